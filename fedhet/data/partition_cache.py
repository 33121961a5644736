"""Assigned partitions on disk.

In a deployment every message is handled by a new process, and importing flwr-datasets takes
seconds.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
import zipfile
from pathlib import Path

import numpy as np

from fedhet.data.files import cache_root

log = logging.getLogger("fedhet.data")
_unwritable: set[Path] = set()  # folders of which this process has said so

# What a damaged npz file raises.
_DAMAGE = (
    OSError,
    ValueError,
    KeyError,
    EOFError,
    RuntimeError,
    TypeError,
    zipfile.BadZipFile,
)


def folder() -> Path:
    """The folder of the cached and the saved partitions."""
    return cache_root() / "partitions"


def load(key: str) -> list[np.ndarray] | None:
    """The index arrays saved under `key`; None if there are none or they are damaged.

    Damage is logged.
    """
    path = folder() / f"{key}.npz"
    try:
        with np.load(path) as file:
            indices = file["indices"]
            ends = file["ends"]
            digest = str(file["digest"])
        if digest == _digest(indices, ends):
            return np.split(indices, ends[:-1])
        problem = "its digest does not match"
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    except _DAMAGE as error:
        problem = str(error)
    log.warning("the cached partition %s is damaged (%s) and is replaced", path, problem)
    return None


def save(key: str, indices: list[np.ndarray]) -> None:
    """Save the index arrays; concurrent processes may save the same key.

    A folder that cannot be written is logged once.
    """
    path = folder() / f"{key}.npz"
    flat = np.concatenate(indices)
    ends = np.cumsum([len(part) for part in indices])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            complete = Path(scratch, path.name)
            np.savez(complete, indices=flat, ends=ends, digest=np.array(_digest(flat, ends)))
            complete.replace(path)  # atomic: a reader sees the whole file or none
    except OSError as error:
        _log_unwritable(path.parent, error)


def _digest(indices: np.ndarray, ends: np.ndarray) -> str:
    return hashlib.sha256(indices.tobytes() + ends.tobytes()).hexdigest()


def _log_unwritable(path: Path, error: Exception) -> None:
    if path in _unwritable:
        return
    _unwritable.add(path)
    log.warning(
        "partitions are not cached, so each process draws its own: %s cannot be written (%s)",
        path,
        error,
    )
