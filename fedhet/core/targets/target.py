"""The common base of all kinds of targets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedhet.core.kinds import Kind, OfLoss
from fedhet.core.trees import check_form, kind

Tally = dict[str, Tensor]
Scores = dict[str, float]


@dataclass(frozen=True)
class Target(Kind, ABC):
    """One kind of target: its loss and its scores.

    Attributes:
        tallied: whether clients send their tallies.
        optional: entries that a tally may lack.
        outputs: the number of the model's outputs for a sample.
    """

    tallied: ClassVar[bool] = True
    optional: ClassVar[frozenset[str]] = frozenset()

    outputs: int

    @abstractmethod
    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each sample, (B,)."""

    @abstractmethod
    def tally(self, output: Tensor, y: Tensor) -> Tally:
        """Return the tally of a batch, from which its scores are computed.

        Args:
            output: (B, ...), the model's output.
            y: (B, ...), the targets.
        """

    @abstractmethod
    def scores(self, tally: Tally) -> Scores:
        """Return the scores of a tally, except scores that these samples do not define."""

    def tallies(self, output: Tensor, y: Tensor, sizes: Sequence[int]) -> list[Tally]:
        """Return the tally of each of several sets of samples.

        Args:
            output: (n, ...), the outputs for all sets, one set after the other.
            y: (n, ...), their targets.
            sizes: the number of samples in each set.
        """
        parts = zip(output.split(sizes), y.split(sizes), strict=True)
        return [self.tally(*part) for part in parts]

    def scored(self, tallies: Sequence[Tally]) -> list[Scores]:
        """Return the scores of each of several tallies."""
        return list(map(self.scores, tallies))

    def details(self, tally: Tally) -> dict[str, Any]:
        """Return numbers and a table to record in addition to the scores; empty for none.

        Args:
            tally: the tally of some samples; empty if there are none.
        """
        return {}

    def join(self, first: Tally, second: Tally) -> Tally:
        """Return the tally of two sets of samples together."""
        return {name: value + second[name] for name, value in first.items() if name in second}

    def joined(self, tallies: Sequence[Tally]) -> Tally:
        """Return the tally of all sets of samples together."""
        return reduce(self.join, tallies)

    def releasable(self, tally: Tally, y: Tensor, least: int) -> tuple[Scores, Tally]:
        """Return the scores and the tally in a form that may leave a site.

        No model, however the server made it, can turn them into a count of fewer than `least`
        samples.

        Args:
            tally: the tally of a set of samples.
            y: the targets of these samples.
            least: the smallest number of samples that may be revealed.

        Returns:
            (scores without the loss, tally). The tally is empty unless the target is `tallied`;
            both are empty if nothing may leave.
        """
        return {}, {}

    @cached_property
    def layout(self) -> Tally:
        """A tally of this task that has the right names, shapes and types."""
        return self.tally(torch.zeros(1, self.outputs), torch.zeros(1, self.outputs))

    def check(self, tally: object) -> Tally:
        """Return the tally that a client has sent, after checks.

        Raises:
            ValueError: it cannot be a tally of this task.
        """
        if not isinstance(tally, dict):
            raise ValueError(f"a tally is {kind(tally)}; expected a tree of tensors")
        lacking = self.optional - tally.keys()
        check_form("a tally", tally, {n: t for n, t in self.layout.items() if n not in lacking})
        samples = int(tally["samples"])
        counts = torch.cat([t.flatten() for t in tally.values() if not t.is_floating_point()])
        if not samples or counts.min() < 0 or counts.max() > samples:
            raise ValueError(f"a tally of {samples} samples has a count below 0 or above that")
        return tally


class LossOnly(OfLoss, Target):
    """Targets of another kind, with a criterion from the caller; the only score is the loss."""

    tallied: ClassVar[bool] = False

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError("target=loss uses the criterion of the Task")

    def tally(self, output: Tensor, y: Tensor) -> Tally:
        return {}

    def scores(self, tally: Tally) -> Scores:
        return {}


def rows(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and targets as (B, K): a number for each output of each sample.

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
    """Return the numbers as a tensor (K,), which scales the inputs or targets of every batch."""
    # The tensor is cached: a first call in inference mode must not make it unusable in training.
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


def whole(value: int, like: Tensor) -> Tensor:
    """Return a count as a tensor on the device of `like`."""
    return torch.tensor(value, dtype=torch.int64, device=like.device)
