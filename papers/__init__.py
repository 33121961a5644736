"""Reproductions of the papers' tables: the runs, the papers' figures and claims, the verdicts.

conf/          the experiments, with the papers' figures and claims; results/ has our results
paper.py       reads the key `paper` of an experiment's file: figures, claims, our choices
verdict.py     the rule by which a figure counts as reproduced
runs.py        the runs of a folder
measures.py    measures of a run: an accuracy, rounds to a target, sizes
judge.py       compares the runs of a folder with the paper
table.py       the comparison as Markdown and csv
picture.py     draws our figures next to the paper's, and curves
command.py     python -m fedhet reproduce
leaderboard.py the leaderboards of all methods
helps.py       the search for settings in which each method helps
tables.py      functions that all pages share
__main__.py    python -m papers: all pages from the results
"""
