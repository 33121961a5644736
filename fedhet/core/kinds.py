"""The kinds of targets, and the names of their scores.

It does not import torch, so that reports begin at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar


class Kind:
    """A kind of target: what its scores are called.

    The first score is the deciding score: the summary's table shows it, it chooses the best round,
    and `eval.thresholds` refer to it. A larger value is better.

    Attributes:
        name: the kind, as in `dataset.target` and `Task.target`.
        title: the deciding score in words, for tables and figures; "" if there is none.
        keys: for each score, the beginning of its keys in rounds.jsonl; the deciding score first.
        pooled: whether the scores of several clients are computed from their joined tallies. If
            not, the mean weighted by samples already is the score of all samples together.
    """

    name: ClassVar[str]
    title: ClassVar[str] = ""
    keys: ClassVar[dict[str, str]] = {}
    pooled: ClassVar[bool] = True

    @classmethod
    def score(cls) -> str:
        """Return the name of the deciding score; "" if there is none."""
        return next(iter(cls.keys), "")

    @classmethod
    def key(cls, where: str) -> str:
        """Return the deciding score's key in rounds.jsonl, such as "acc_global"; "" if none.

        Args:
            where: "global", "clients_mean", ...
        """
        return f"{cls.keys[cls.score()]}_{where}" if cls.keys else ""

    @classmethod
    def clients_key(cls, view: str = "clients") -> str:
        """Return the key of the deciding score on the clients' test data, as "acc_clients_mean".

        This score is the mean over the clients; or, if `pooled`, the score of all their samples
        together.
        """
        return cls.key(f"{view}_{'weighted' if cls.pooled else 'mean'}")


class OfClasses(Kind):
    """Each sample has one of several classes."""

    name: ClassVar[str] = "class"
    title: ClassVar[str] = "accuracy"
    keys: ClassVar[dict[str, str]] = {"accuracy": "acc"}
    pooled: ClassVar[bool] = False


class OfCharacters(OfClasses):
    """Each sample is a text, and its class is the character that follows it."""

    name: ClassVar[str] = "next_char"


class OfNumbers(Kind):
    """Each sample has numbers."""

    name: ClassVar[str] = "number"
    title: ClassVar[str] = "R2"
    keys: ClassVar[dict[str, str]] = {"r2": "r2", "mae": "mae", "rmse": "rmse"}


class OfLabels(Kind):
    """Each sample has any number of labels."""

    name: ClassVar[str] = "labels"
    title: ClassVar[str] = "micro F1"
    keys: ClassVar[dict[str, str]] = {
        "f1_micro": "f1_micro",
        "f1_macro": "f1_macro",
        "subset_accuracy": "subset_accuracy",
    }


class OfLoss(Kind):
    """The targets have a criterion of the caller's own, and no score."""

    name: ClassVar[str] = "loss"
    pooled: ClassVar[bool] = False


KINDS: dict[str, type[Kind]] = {
    kind.name: kind for kind in (OfClasses, OfNumbers, OfLabels, OfCharacters, OfLoss)
}


def of_row(row: Mapping[str, object]) -> type[Kind]:
    """Return the kind of target that a line of rounds.jsonl has scores of."""
    return next((kind for kind in KINDS.values() if kind.key("global") in row), OfLoss)
