"""Experiments: many runs from one yaml file, what is tuned before them, and what is kept of them.

definition.py   reads the file: axes, what is tuned, what is reported
cells.py        the runs of an experiment, which are called its cells
tuning.py       the trials, and the choice among them by validation
folder.py       what is on the disk: which cells are there, and experiment.json
progress.py     checks all cells, and has those launched that are missing
"""
