"""Small modules in place of a library's."""

from __future__ import annotations

from torch import nn

from fedhet.models.library import LibraryModel


def net(classes: int, width: int = 4) -> nn.Sequential:
    """A module with batch norm, dropout, and two linear layers."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(48, width),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(width, classes),
    )


def cut(
    whole: nn.Module,
    classes: int = 3,
    weights: str | None = None,
    shape: tuple[int, ...] = (3, 4, 4),
) -> LibraryModel:
    return LibraryModel(whole, name="lib/net", shape=shape, classes=classes, weights=weights)
