"""Where the runs of a sweep or an experiment are made, and how they are watched.

executors.py   planned runs, and what makes them: here, in processes, on Ray, on Slurm
preload.py     what the process imports from which those of this machine are forked
live.py        shows how far the runs are
"""
