"""The papers' tables beside fedhet: their runs, what the papers say of them, and verdicts.

conf/          the experiments, with what the papers print and say; results/ has what they gave
paper.py       reads the key `paper` of an experiment's file: figures, claims, what was chosen
verdict.py     the rule by which a figure counts as reproduced
runs.py        the runs of a folder
measures.py    what is measured of a run: an accuracy, rounds to a target, sizes
judge.py       compares the runs of a folder with the paper
table.py       the comparison as Markdown and csv
picture.py     our figures beside the paper's, and curves, drawn
command.py     python -m fedhet reproduce
leaderboard.py and helps.py: experiments of all methods, and the search for where each helps
tables.py      what the pages share
__main__.py    python -m papers: all pages from the results
"""
