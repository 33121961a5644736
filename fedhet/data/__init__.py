"""Datasets, partitions, and the clients' data that they determine.

Names are resolved on first use (PEP 562), so that checking a partition's settings does not import
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedhet.data.dataset import Dataset
    from fedhet.data.federation import FederatedData, Normalize, class_counts, split, transform
    from fedhet.data.partition import (
        Dirichlet,
        Iid,
        Natural,
        Partition,
        Pathological,
        Quantity,
        Saved,
        Scheme,
        Shards,
    )

_MODULES = {
    "Dataset": "dataset",
    "Dirichlet": "partition",
    "FederatedData": "federation",
    "Iid": "partition",
    "Natural": "partition",
    "Normalize": "federation",
    "Partition": "partition",
    "Pathological": "partition",
    "Quantity": "partition",
    "Saved": "partition",
    "Scheme": "partition",
    "Shards": "partition",
    "class_counts": "federation",
    "split": "federation",
    "transform": "federation",
}

__all__ = [
    "Dataset",
    "Dirichlet",
    "FederatedData",
    "Iid",
    "Natural",
    "Normalize",
    "Partition",
    "Pathological",
    "Quantity",
    "Saved",
    "Scheme",
    "Shards",
    "class_counts",
    "split",
    "transform",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"fedhet.data.{_MODULES[name]}"), name)
