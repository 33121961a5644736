"""merge=median and merge=trimmed_mean: averages of each entry by itself (Yin et al. 2018).

Both ignore the weights of the updates, and both keep all updates of a step in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from fedhet import check, trees
from fedhet.maths import robust
from fedhet.merging.mean import LEAST, Average, Mean
from fedhet.trees import AnyTree, Tree


class Coordinates(Mean):
    """Replaces the mean by a function of each entry's values."""

    weighted: ClassVar[bool] = False
    averages: ClassVar[bool] = True

    def combine(self, values: Tensor) -> Tensor:
        """(K, n) values of K clients -> (n,) their average."""
        raise NotImplementedError

    def average(self) -> Average:
        return Collected(self.combine)


class Median(Coordinates):
    """The coordinate-wise median."""

    name = "median"

    @property
    def least(self) -> int:
        return LEAST

    def combine(self, values: Tensor) -> Tensor:
        return robust.median(values)


class TrimmedMean(Coordinates):
    """The coordinate-wise mean without the extreme values.

    Args:
        share: the share of the values that is left out at each end, in [0, .5).
    """

    name = "trimmed_mean"

    def __init__(self, *, share: float = 0.2) -> None:
        self.share = check.number("merge.share", share, low=0, open_high=0.5)
        super().__init__()

    @property
    def least(self) -> int:
        """With fewer, no value would be left out."""
        return math.ceil(round(1 / self.share, 9)) if self.share else 1

    def combine(self, values: Tensor) -> Tensor:
        return robust.trimmed_mean(values, self.share)


class Collected:
    """Keeps the trees, and combines them in the end, a block of entries at a time."""

    def __init__(self, combine: Callable[[Tensor], Tensor]) -> None:
        self._combine = combine
        self._trees: list[AnyTree] = []

    def add(self, tree: AnyTree, weight: float) -> None:
        self._trees.append(tree)

    def mean(self, *, reuse: bool = False) -> Tree:
        if not self._trees:
            raise ValueError("the average of no tree")
        return {name: self._combined(name) for name in self._trees[0]}

    def _combined(self, name: str) -> Tensor:
        tensors = [tree[name] for tree in self._trees]
        block = max(1, trees.SUM_BLOCK // len(tensors))
        rows = [t.double().flatten().split(block) for t in tensors]
        parts = [self._combine(torch.stack(part)) for part in zip(*rows, strict=True)]
        return torch.cat(parts).view(tensors[0].shape)
