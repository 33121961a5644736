"""Where the runs of a sweep or an experiment are made, and how they are watched.

runs.py        a planned run: how it is made, here or in a process of its own, and how it has ended
executors.py   makes planned runs: here, in processes of this machine, on Ray, on Slurm
preload.py     what the process imports from which those of this machine are forked
live.py        shows how far the runs are
"""
