"""`python -m fedhet deploy`: the files of a deployment, checks of them, and who is online."""
