"""The kinds of targets that a task learns: class, number, labels, next_char; their loss and scores.

A `Target` computes its scores from tallies: small tensors of counts and sums. Tallies of several
clients can be joined to the tally of all their samples. The scores reported for several clients are
therefore exact, instead of a mean of ratios.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedhet.core.targets.classes import (
    Classes,
    DetailedClasses,
    NextCharacter,
    cross_entropy,
    macro_f1,
)
from fedhet.core.targets.labels import Labels
from fedhet.core.targets.number import Number
from fedhet.core.targets.target import LossOnly, Scores, Tally, Target

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
]
TARGETS: dict[str, type[Target]] = {
    kind.name: kind for kind in (Classes, Number, Labels, NextCharacter, LossOnly)
}
WITH_CLASSES = ("class", "next_char")  # each sample has one of the classes


def make(
    name: str,
    outputs: int,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    *,
    detailed: bool = False,
) -> Target:
    """Return the target of a task.

    Args:
        name: the kind.
        outputs: the number of the model's outputs for a sample.
        mean, std: the mean and standard deviation of each number, see `Number`.
        detailed: whether classes are scored as `DetailedClasses`.
    """
    if name == Classes.name and detailed:
        return DetailedClasses(outputs)
    if name == Number.name:
        return Number(outputs, tuple(mean), tuple(std))
    return TARGETS[name](outputs)
