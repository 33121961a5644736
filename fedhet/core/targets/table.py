"""The kinds of targets by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedhet.core.targets.base import LossOnly, Target
from fedhet.core.targets.classes import Classes, NextCharacter
from fedhet.core.targets.detailed import DetailedClasses
from fedhet.core.targets.labels import Labels
from fedhet.core.targets.number import Number

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
    """The target of a task.

    Args:
        name: the kind.
        outputs: the number of the model's outputs for a sample.
        mean, std: of each number, see `Number`.
        detailed: whether classes are scored as `DetailedClasses`.
    """
    if name == Classes.name and detailed:
        return DetailedClasses(outputs)
    if name == Number.name:
        return Number(outputs, tuple(mean), tuple(std))
    return TARGETS[name](outputs)


def of_row(row: Mapping[str, object]) -> type[Target]:
    """The kind that a line of rounds.jsonl is about."""
    for kind in TARGETS.values():
        if kind.key("global") in row:
            return kind
    return LossOnly
