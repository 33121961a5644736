"""Assigned partitions on disk: in a real deployment every message is a new process, and
flwr-datasets takes seconds to import."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import zipfile
from functools import cache
from pathlib import Path

import numpy as np

log = logging.getLogger("fedhet.data")


def root() -> Path:
    """`$FEDHET_CACHE`, by default `~/.cache/fedhet`."""
    return Path(os.environ.get("FEDHET_CACHE") or Path.home() / ".cache" / "fedhet")


def folder() -> Path:
    """Of the partitions."""
    return root() / "partitions"


def load(key: str) -> list[np.ndarray] | None:
    """The index arrays saved as `key`; None where there are none, or they are damaged (which is
    logged)."""
    path = folder() / f"{key}.npz"
    try:
        with np.load(path) as file:
            indices, ends, digest = file["indices"], file["ends"], str(file["digest"])
        if digest == _digest(indices, ends):
            return np.split(indices, ends[:-1])
        problem = "its digest is another"
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    except (
        OSError,
        ValueError,
        KeyError,
        EOFError,
        RuntimeError,
        TypeError,
        zipfile.BadZipFile,
    ) as error:  # what a damaged npz raises
        problem = str(error)
    log.warning("the cached partition %s is damaged (%s): it is made anew", path, problem)
    return None


def save(key: str, indices: list[np.ndarray]) -> None:
    """Saves the index arrays; concurrent processes may save the same key. A folder that cannot be
    written is logged once."""
    path = folder() / f"{key}.npz"
    flat, ends = np.concatenate(indices), np.cumsum([len(part) for part in indices])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            whole = Path(scratch, path.name)
            np.savez(whole, indices=flat, ends=ends, digest=np.array(_digest(flat, ends)))
            whole.replace(path)  # atomic: a reader sees the whole file or none
    except OSError as error:
        _unwritable(path.parent, str(error))


def _digest(indices: np.ndarray, ends: np.ndarray) -> str:
    return hashlib.sha256(indices.tobytes() + ends.tobytes()).hexdigest()


@cache  # once per folder
def _unwritable(place: Path, error: str) -> None:
    log.warning(
        "partitions are not cached, each process makes its own: %s cannot be written (%s)",
        place,
        error,
    )
