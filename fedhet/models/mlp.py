"""Multi-layer perceptrons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from fedhet import check
from fedhet.models.base import Classifier


class MLP(Classifier):
    """Linear layers with ReLU between them; `hidden` [200, 200] is the 2NN of McMahan et al. 2017.

    Args:
        shape: of an input, any: it is flattened.
        classes: number of classes.
        hidden: the hidden layers' widths, each >= 1.
        norm: "none", or "batch": batch norm before each ReLU.
    """

    def __init__(
        self, *, shape: tuple[int, ...], classes: int, hidden: Sequence[int], norm: str = "none"
    ) -> None:
        widths = [math.prod(shape), *check.each(check.integer, "model.hidden", hidden, low=1)]
        batch = check.one_of("model.norm", norm, ("none", "batch")) == "batch"
        super().__init__()
        layers = [
            layer
            for a, b in pairwise(widths)
            for layer in (nn.Linear(a, b), *([nn.BatchNorm1d(b)] if batch else []), nn.ReLU())
        ]
        self.body = nn.Sequential(nn.Flatten(), *layers)
        self.head = nn.Linear(widths[-1], classes)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)


class Logistic(MLP):
    """Multinomial logistic regression: a linear layer on the flattened input, which is its own
    features."""

    def __init__(self, *, shape: tuple[int, ...], classes: int) -> None:
        super().__init__(shape=shape, classes=classes, hidden=[])
