"""The command line, `python -m fedhet`."""
