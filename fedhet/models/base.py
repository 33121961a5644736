"""What every model has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor, nn


class Classifier(nn.Module, ABC):
    """`head(features(x))`, where `head` is an `nn.Linear` from d features to the classes, the last entry of the state dictionary."""

    head: nn.Linear
    text: ClassVar[bool] = False  # whether x (B, T) are token numbers

    @abstractmethod
    def features(self, x: Tensor) -> Tensor:
        """x (B, C, H, W) -> (B, d), after the last activation."""

    def forward(self, x: Tensor) -> Tensor:
        """x (B, C, H, W) -> logits (B, classes)."""
        return self.head(self.features(x))
