"""Decoded arrays on disk: the first process that needs a dataset decodes it, and all others map it.

An entry is a folder `$FEDHET_CACHE/data/<hash of its key>` with one .npy file per array and a
header. Processes that map it share its pages of memory. Any entry may be deleted.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedhet.core.errors import DataError
from fedhet.data.files import cache_root

log = logging.getLogger("fedhet.data")
_unwritable: set[Path] = set()  # folders of which this process has said so

_FORMAT = 3  # part of every key: increase it when the layout or the meaning of an entry changes
_HEADER = "header.json"

Arrays = dict[str, np.ndarray]


def signature(paths: Iterable[Path]) -> str:
    """The source files' part of a key: a hash of each one's path, size and modification time.

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
    """32 hex digits for the arrays that `cached_arrays` returns for this name and key."""
    return hashlib.sha256(_full_key(name, key).encode()).hexdigest()[:32]


def _full_key(name: str, key: Mapping[str, Any]) -> str:
    return json.dumps([_FORMAT, name, key], sort_keys=True)


def cached_arrays(
    name: str, key: Mapping[str, Any], make: Callable[[], Arrays], *, private: bool = False
) -> Arrays:
    """The arrays that `make` returns, mapped from disk.

    `make` is called only if no earlier process has stored them. The arrays are writable, but
    writing changes neither the disk nor other processes, and `torch.from_numpy` does not copy them.
    A damaged entry is replaced, and a cache that cannot be written is bypassed; both are logged.

    Args:
        name: the dataset's name, for messages.
        key: everything that determines the arrays, as JSON: the loader, its settings and the
            `signature` of the source files.
        make: decodes the data into named arrays (numbers or fixed-width text, no objects).
        private: whether this user alone may read the entry, whatever the umask.
    """
    from filelock import FileLock

    full_key = _full_key(name, key)
    entry = cache_root() / "data" / identity(name, key)
    if (arrays := _load(entry, full_key)) is not None:
        return arrays
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{entry}.lock").acquire()
    except (OSError, NotImplementedError) as error:  # some file systems have no locks
        _log_unwritable(entry.parent, error)
        return make()
    with lock:
        # Another process may have stored them while this one waited for the lock.
        if (arrays := _load(entry, full_key)) is not None:
            return arrays
        return _save(entry, full_key, make(), private)


def _load(entry: Path, full_key: str) -> Arrays | None:
    """The arrays of an entry; None if it does not exist or is damaged (which is logged)."""
    try:
        if not entry.is_dir():
            return None
        header = json.loads((entry / _HEADER).read_text())
        arrays = {
            name: np.asarray(np.load(entry / f"{name}.npy", mmap_mode="c"))
            for name in header["arrays"]
        }
        if header["key"] != full_key or _layout(arrays) != header["arrays"]:
            raise ValueError("its header describes other arrays")
        return arrays
    # what a damaged header or array raises
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        log.warning("the cached data in %s are damaged (%s) and are replaced", entry, error)
    return None


def _save(entry: Path, full_key: str, arrays: Arrays, private: bool) -> Arrays:
    """Save the arrays and map them; if that fails, return them as they are in memory.

    The caller holds the lock of the entry.
    """
    try:
        shutil.rmtree(entry, ignore_errors=True)  # a damaged entry
        with tempfile.TemporaryDirectory(dir=entry.parent) as scratch:
            complete = Path(scratch, "entry")
            complete.mkdir(0o700 if private else 0o777)
            for name, array in arrays.items():
                np.save(complete / f"{name}.npy", array, allow_pickle=False)
            header = {"key": full_key, "arrays": _layout(arrays)}
            (complete / _HEADER).write_text(json.dumps(header))
            complete.replace(entry)  # atomic: a reader sees the whole entry or none
    except OSError as error:
        _log_unwritable(entry.parent, error)
        return arrays
    return _load(entry, full_key) or arrays


def _layout(arrays: Arrays) -> dict[str, list[Any]]:
    """Each array's dtype and shape, as JSON."""
    return {name: [array.dtype.str, list(array.shape)] for name, array in arrays.items()}


def _log_unwritable(folder: Path, error: Exception) -> None:
    if folder in _unwritable:
        return
    _unwritable.add(folder)
    log.warning(
        "decoded data are not cached, so each process decodes its own: %s cannot be written (%s)",
        folder,
        error,
    )
