"""The papers' tables and figures: their runs, what the papers say of them, and verdicts.

paper.py      reads the key `paper` of an experiment's file: figures, claims, what was chosen
verdict.py    the rule by which a figure counts as reproduced
runs.py       the runs of a folder
measures.py   what is measured of a run: an accuracy, rounds to a target, sizes
pairs.py      what runs measure seed by seed, alone and against others
judge.py      compares the runs of a folder with the paper
table.py      the comparison as Markdown and CSV
picture.py    our figures beside the paper's, drawn
estimate.py   how long a reproduction takes, from a few measured steps
command.py    python -m fedhet reproduce
"""
