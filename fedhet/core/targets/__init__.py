"""What a task learns, and how that is trained and scored: class, number, labels or next_char.

A `Target` has the loss of the kind, and its scores. Scores are computed from tallies, small tensors
that can be joined: those of two clients together are the tally of all their samples, so what is
reported for several clients is exact, and no mean of ratios.
"""

from fedhet.core.targets.base import LossOnly, Scores, Tally, Target
from fedhet.core.targets.classes import Classes, NextCharacter, cross_entropy, macro_f1
from fedhet.core.targets.labels import Labels
from fedhet.core.targets.number import Number
from fedhet.core.targets.table import TARGETS, WITH_CLASSES, make, of_row

__all__ = [
    "TARGETS",
    "WITH_CLASSES",
    "Classes",
    "Labels",
    "LossOnly",
    "NextCharacter",
    "Number",
    "Scores",
    "Tally",
    "Target",
    "cross_entropy",
    "macro_f1",
    "make",
    "of_row",
]
