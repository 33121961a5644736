"""What the kinds of targets have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedhet.core.trees import check_form, kind

Tally = dict[str, Tensor]
Scores = dict[str, float]


@dataclass(frozen=True)
class Target(ABC):
    """One kind of target: its loss and its scores.

    The first of its scores is the one that decides: it is in the summary's table, chooses the best
    round, and is what `eval.thresholds` are about. A larger value is better.

    Attributes:
        name: the kind, as `dataset.target` and `Task.target` name it.
        title: the deciding score in words, for tables and figures; "" where there is none.
        keys: score -> the beginning of its keys in rounds.jsonl, the deciding score first.
        pooled: whether a score of several clients is that of all their samples together, from
            their tallies. Where it is false, the mean that is weighted by the samples is that
            already.
        tallied: whether clients send their tallies.
        optional: what a tally may lack.
        outputs: the number of the model's outputs for a sample.
    """

    name: ClassVar[str]
    title: ClassVar[str] = ""
    keys: ClassVar[dict[str, str]] = {}
    pooled: ClassVar[bool] = True
    tallied: ClassVar[bool] = True
    optional: ClassVar[frozenset[str]] = frozenset()

    outputs: int

    @classmethod
    def score(cls) -> str:
        """The name of the deciding score; "" where there is none."""
        return next(iter(cls.keys), "")

    @classmethod
    def key(cls, where: str) -> str:
        """The deciding score's key in rounds.jsonl, such as "acc_global"; "" where there is none.

        Args:
            where: "global", "clients_mean", ...
        """
        return f"{cls.keys[cls.score()]}_{where}" if cls.keys else ""

    @classmethod
    def clients_key(cls, view: str = "clients") -> str:
        """The key of the deciding score on the clients' test data, such as "acc_clients_mean".

        It is the mean over the clients, or, where they send tallies, the score of all their samples
        together.
        """
        return cls.key(f"{view}_{'weighted' if cls.pooled else 'mean'}")

    @abstractmethod
    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        """The loss of each sample, (B,)."""

    @abstractmethod
    def tally(self, output: Tensor, y: Tensor) -> Tally:
        """What the scores of a batch are computed from.

        Args:
            output: (B, ...), the model's output.
            y: (B, ...), the targets.
        """

    @abstractmethod
    def scores(self, tally: Tally) -> Scores:
        """The scores of a tally; one that is not defined for these samples is left out."""

    def details(self, tally: Tally) -> dict[str, Any]:
        """What is recorded of a tally beside its scores: numbers, and a table; empty for nothing.

        Args:
            tally: that of some samples; empty where there are none.
        """
        return {}

    def join(self, first: Tally, second: Tally) -> Tally:
        """The tally of two sets of samples together."""
        return {name: value + second[name] for name, value in first.items() if name in second}

    def joined(self, tallies: Sequence[Tally]) -> Tally:
        """The tally of all sets of samples together."""
        return reduce(self.join, tallies)

    def releasable(self, tally: Tally, y: Tensor, least: int) -> tuple[Scores, Tally]:
        """What may leave a site of a tally, so that no model makes it a count of few samples.

        Args:
            tally: what the scores of a set of samples are computed from.
            y: the targets of these samples.
            least: the smallest number of samples that is revealed.

        Returns:
            The scores, without the loss, and the tally, if the target is `tallied`; both are empty
            where nothing may leave.
        """
        return {}, {}

    @cached_property
    def layout(self) -> Tally:
        """A tally of this task, for its names, shapes and types."""
        return self.tally(torch.zeros(1, self.outputs), torch.zeros(1, self.outputs))

    def check(self, tally: object) -> Tally:
        """A tally that a client has sent.

        Raises:
            ValueError: it is not one of this task.
        """
        if not isinstance(tally, dict):
            raise ValueError(f"a tally is {kind(tally)}")
        lacking = self.optional - tally.keys()
        check_form("a tally", tally, {n: t for n, t in self.layout.items() if n not in lacking})
        samples = int(tally["samples"])
        counts = torch.cat([t.flatten() for t in tally.values() if not t.is_floating_point()])
        if not samples or counts.min() < 0 or counts.max() > samples:
            raise ValueError(f"a tally of {samples} samples whose counts are not among them")
        return tally


class LossOnly(Target):
    """Targets of the caller's own, of which only the loss is known; it decides, too."""

    name: ClassVar[str] = "loss"
    pooled: ClassVar[bool] = False
    tallied: ClassVar[bool] = False

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError("the criterion of such a task is its caller's")

    def tally(self, output: Tensor, y: Tensor) -> Tally:
        return {}

    def scores(self, tally: Tally) -> Scores:
        return {}


def rows(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Output and targets as (B, K): a number for each output of each sample.

    Raises:
        ValueError: their sizes differ.
    """
    if output.numel() != y.numel() or len(output) != len(y):
        raise ValueError(
            f"the model's output has the shape {tuple(output.shape)}, the targets"
            f" {tuple(y.shape)}; it must have one output for each number of y"
        )
    return output.reshape(len(output), -1), y.reshape(len(y), -1)


@lru_cache
def constant(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """(K,) these numbers, which the inputs or targets of every batch are scaled by."""
    # The tensor is kept: a first call in inference mode must not make it unusable in training.
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


def whole(value: int, like: Tensor) -> Tensor:
    """A count as a tensor, where `like` is."""
    return torch.tensor(value, dtype=torch.int64, device=like.device)
