"""What every model has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from torch import Tensor, nn

from fedhet import check
from fedhet.errors import ConfigError


class Classifier(nn.Module, ABC):
    """`head(features(x))`, where `head` is an `nn.Linear` from d features to the classes, the last
    entry of the state dictionary."""

    head: nn.Linear
    text: ClassVar[bool] = False  # whether x (B, T) are token numbers

    @abstractmethod
    def features(self, x: Tensor) -> Tensor:
        """x (B, *shape) -> (B, d), what the head reads."""

    def forward(self, x: Tensor) -> Tensor:
        """x (B, *shape) -> logits (B, classes)."""
        return self.head(self.features(x))


def require_features(model: nn.Module, who: str) -> None:
    """Refuse a model without features(x), for a method that reads the input of the head.

    Raises:
        ConfigError: the model has no features(x); the message begins with `who`.
    """
    if not hasattr(model, "features"):
        raise ConfigError(
            f"{who} needs a model with features(x) and head(f); {type(model).__name__} has no"
            " features"
        )


def image_shape(model: str, shape: tuple[int, ...], smallest: int = 1) -> tuple[int, int, int]:
    """`shape`, if it is (C, H, W) with H and W of `smallest` pixels at least.

    Raises:
        ConfigError: it is not; with what the model takes, and what it is given.
    """
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise ConfigError(
            f"model: the {model} takes images (C, H, W) of {smallest}x{smallest} or more; these"
            f" samples are {tuple(shape)}"
        )
    return shape


def norm_layer(norm: str, groups: int) -> Callable[[int], nn.Module]:
    """(channels) -> batch normalisation, or group normalisation in `groups` groups, which has no
    running statistics to average."""
    check.one_of("model.norm", norm, ("batch", "group"))
    return nn.BatchNorm2d if norm == "batch" else partial(nn.GroupNorm, groups)
