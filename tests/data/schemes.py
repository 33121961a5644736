"""Partition schemes with default settings, and the data that they partition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from composing import composed

from fedhet.data.partition import (
    Dirichlet,
    DrawnScheme,
    Iid,
    Listed,
    Natural,
    Partition,
    Pathological,
    Quantity,
    Saved,
    Shards,
)
from fedhet.runs.run_data import RunData

OPTIONS = {
    Iid: {},
    Dirichlet: {"alpha": 0.5},
    Pathological: {"classes": 2},
    Listed: {"classes": [[*range(10)], [*range(5)]]},
    Shards: {"shards": 2},
    Quantity: {"sizes": "dirichlet", "alpha": 0.5},
}
SCHEMES = list(OPTIONS)

# Four owners with 1, 14, 5 and 30 samples.
OWNERS = np.repeat([2, 0, 3, 1], [5, 1, 30, 14])[np.random.default_rng(0).permutation(50)]
NAMES = ("anna", "ben", "carla", "dora")


def make(kind: type[DrawnScheme], **keys: object) -> DrawnScheme:
    """A scheme for 10 clients."""
    defaults = {
        "name": kind.__name__,
        "clients": 10,
        "min_size": 1,
        "split": [0.8, 0.1, 0.1],
        "noise": 0,
    }
    return kind(**{**defaults, **OPTIONS[kind], **keys})


def natural(**keys: object) -> Natural:
    """The scheme `natural` with a client per owner."""
    defaults = {
        "name": "natural",
        "clients": None,
        "min_size": 0,
        "split": [0.8, 0.1, 0.1],
        "noise": 0,
    }
    return Natural(**{**defaults, **keys})


def saved_scheme(name: str | Path, **keys: Any) -> Saved:
    """The saved partition of this name or path."""
    return Saved(**{"name": str(name), "split": None, "noise": None, **keys})


def run_data(*overrides: str) -> RunData:
    """The data of a run with these overrides."""
    return RunData.of(composed(*overrides).cfg)


def labels(classes: int = 10, each: int = 60) -> np.ndarray:
    """Sorted by class, like the files of an image folder."""
    return np.repeat(np.arange(classes), each)


def counts(y: np.ndarray, partition: Partition) -> np.ndarray:
    """(clients, classes), the number of samples."""
    classes = y.max() + 1
    return np.stack([np.bincount(y[indices], minlength=classes) for indices in partition.indices])


def sizes(partition: Partition) -> np.ndarray:
    """(clients,), the number of samples."""
    return np.array(list(map(len, partition.indices)))
