"""Multi-layer perceptrons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from fedhet.core import check
from fedhet.models.base import Classifier


class MLP(Classifier):
    """Linear layers with ReLU between them; `hidden` [200, 200] is McMahan et al.'s 2NN (2017).

    Args:
        shape: the shape of an input, which is flattened.
        classes: the number of outputs: of classes, labels or numbers.
        hidden: the widths of the hidden layers, each >= 1.
        norm: "none", or "batch" for batch norm before each ReLU.
    """

    def __init__(
        self, *, shape: tuple[int, ...], classes: int, hidden: Sequence[int], norm: str = "none"
    ) -> None:
        widths = [math.prod(shape), *check.each(check.integer, "model.hidden", hidden, low=1)]
        check.one_of("model.norm", norm, ("none", "batch"))
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise(widths):
            layers.append(nn.Linear(inputs, outputs))
            if norm == "batch":
                layers.append(nn.BatchNorm1d(outputs))
            layers.append(nn.ReLU())
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], classes)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)


class Logistic(MLP):
    """Multinomial logistic regression: one linear layer, whose features are the flattened input."""

    def __init__(self, *, shape: tuple[int, ...], classes: int) -> None:
        super().__init__(shape=shape, classes=classes, hidden=[])
