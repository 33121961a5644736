"""The commands of `python -m fedhet data`."""
