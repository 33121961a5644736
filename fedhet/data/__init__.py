"""Datasets, partitions, and the federations they make.

Names are resolved on first use (PEP 562), so that checking a partition's settings does not import
torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedhet.data.dataset import Dataset
    from fedhet.data.federation import Federation, Normalize, describe, split, transform
    from fedhet.data.partition import Dirichlet, Iid, Natural, Pathological, Quantity, Shards
    from fedhet.data.saved import Saved
    from fedhet.data.scheme import Partition, Scheme

_HOME = {
    **dict.fromkeys(("Dataset",), "fedhet.data.dataset"),
    **dict.fromkeys(
        ("Federation", "Normalize", "describe", "split", "transform"), "fedhet.data.federation"
    ),
    **dict.fromkeys(
        ("Dirichlet", "Iid", "Natural", "Pathological", "Quantity", "Shards"),
        "fedhet.data.partition",
    ),
    **dict.fromkeys(("Saved",), "fedhet.data.saved"),
    **dict.fromkeys(("Partition", "Scheme"), "fedhet.data.scheme"),
}

__all__ = [
    "Dataset",
    "Dirichlet",
    "Federation",
    "Iid",
    "Natural",
    "Normalize",
    "Partition",
    "Pathological",
    "Quantity",
    "Saved",
    "Scheme",
    "Shards",
    "describe",
    "split",
    "transform",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
