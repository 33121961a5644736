"""A cache of arrays on disk: the first process decodes a dataset, later processes memory-map it.

An entry is a folder `$FEDHET_CACHE/data/<hash of its key>` with a header and one .npy file per
array. Processes that map an entry share its memory pages. Any entry may be deleted.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fedhet.core.errors import DataError
from fedhet.data.files import cache_root, log

_FORMAT = 6  # part of every key: increase it when the layout or the meaning of an entry changes
_HEADER = "header.json"

Arrays = dict[str, np.ndarray]


def signature(paths: Iterable[Path]) -> str:
    """Return the source files' part of a key: a hash of their paths, sizes and modification times.

    Raises:
        DataError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for path in paths:
        try:
            stat = path.stat()
        except OSError as error:  # for example a broken link
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        digest.update(f"{path.absolute()}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def identity(name: str, key: Mapping[str, Any]) -> str:
    """Return 32 hex digits that identify the arrays of this name and key."""
    full_key = json.dumps([_FORMAT, name, key], sort_keys=True)
    return hashlib.sha256(full_key.encode()).hexdigest()[:32]


def cached_arrays(name: str, key: Mapping[str, Any], make: Callable[[], Arrays]) -> Arrays:
    """Return the arrays of `make`, memory-mapped from disk.

    `make` is called only if no earlier process has stored the arrays. The arrays are writable, but
    a change affects neither the disk nor other processes. `torch.from_numpy` does not copy them.
    A damaged entry is replaced. If the cache cannot be written, it is not used. Both are logged.

    Args:
        name: the dataset's name.
        key: everything that determines the arrays, as JSON: the loader, its settings and the
            `signature` of the source files.
        make: decodes the data into named arrays (numbers or fixed-width text, no objects).
    """
    from filelock import FileLock

    entry = cache_root() / "data" / identity(name, key)
    if (arrays := _load(entry)) is not None:
        return arrays
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{entry}.lock").acquire()
    except (OSError, NotImplementedError) as error:  # some file systems have no locks
        _log_unwritable(entry.parent, getattr(error, "strerror", str(error)))
        return make()
    with lock:
        # Another process may have stored them while this one waited for the lock.
        if (arrays := _load(entry)) is not None:
            return arrays
        arrays = make()
        try:
            shutil.rmtree(entry, ignore_errors=True)  # a damaged entry
            with tempfile.TemporaryDirectory(dir=entry.parent) as scratch:
                complete = Path(scratch, "entry")
                complete.mkdir()
                for part, array in arrays.items():
                    np.save(complete / f"{part}.npy", array, allow_pickle=False)
                (complete / _HEADER).write_text(json.dumps(_described(arrays)))
                complete.replace(entry)  # atomic: a reader sees the whole entry or no entry
        except OSError as error:
            _log_unwritable(entry.parent, getattr(error, "strerror", str(error)))
            return arrays
        return _load(entry) or arrays


def _load(entry: Path) -> Arrays | None:
    """Return the arrays of an entry; None if it does not exist or is damaged (which is logged)."""
    try:
        if not entry.is_dir():
            return None
        header = json.loads((entry / _HEADER).read_text())
        arrays = {
            name: np.asarray(np.load(entry / f"{name}.npy", mmap_mode="c"))
            for name in header["arrays"]
        }
        if header != _described(arrays):
            raise ValueError("its header describes other arrays")
        return arrays
    except Exception as error:  # noqa: BLE001 -- for a damaged header, numpy may raise anything
        log.warning("the cached data in %s are damaged (%s) and are replaced", entry, error)
    return None


def _described(arrays: Arrays) -> dict[str, Any]:
    """Return the header of an entry: each array's dtype and shape."""
    return {"arrays": {name: [a.dtype.str, list(a.shape)] for name, a in arrays.items()}}


@cache  # a process warns once per folder
def _log_unwritable(folder: Path, cause: str) -> None:
    log.warning(
        "data are not cached, so each process decodes them again: %s cannot be written (%s)",
        *(folder, cause),
    )
