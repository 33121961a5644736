"""Many runs from one file: their definition, their launch and their report.

definition.py   reads the file of an experiment: axes, tuning, report
cells.py        the runs and trials of an experiment (the code calls both "cells")
tuning.py       the values that trials try, and the choice among them by validation
folder.py       the folder of an experiment: finished runs, and experiment.json
progress.py     checks all runs and trials, and launches the missing ones
executors.py    planned runs, and their executors: this process, processes, Ray, Slurm
preload.py      the imports of the process that forks the runs of this machine
live.py         shows the progress of the runs
report/         frames, tables, tests, figures and a page from run folders

It may import core, data, engines, methods and runs.
"""
