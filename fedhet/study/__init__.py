"""Many runs from one file: what they are, what makes them, and what they show.

definition.py   reads the file of an experiment: axes, what is tuned, what is reported
cells.py        the runs of an experiment, which are called its cells
tuning.py       the trials, and the choice among them by validation
folder.py       what is on the disk: which cells are there, and experiment.json
progress.py     checks all cells, and has those launched that are missing
executors.py    planned runs, and what makes them: here, in processes, on Ray, on Slurm
preload.py      what the process imports from which those of this machine are forked
live.py         shows how far the runs are
report/         runs in folders as frames, tables, tests, figures and a page

It may import core, data, engines, methods and runs.
"""
