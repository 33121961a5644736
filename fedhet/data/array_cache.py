"""Decoded arrays on disk: the first process to need a dataset decodes it, every later one maps the
same pages of memory.

Each entry is a folder `$FEDHET_CACHE/data/<hash of its key>` of one .npy file per array and a
header. Any may be deleted."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fedhet.data.partition_cache import root
from fedhet.errors import DataError

log = logging.getLogger("fedhet.data")

_FORMAT = 1  # part of every key: raise it when an entry is laid out otherwise
_HEADER = "header.json"

Arrays = dict[str, np.ndarray]


def signature(paths: Iterable[Path]) -> str:
    """What a key says of its source files: a hash of each one's path, size and time of the last
    change.

    Raises:
        DataError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for path in paths:
        try:
            stat = path.stat()
        except OSError as error:  # such as a link to nowhere
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        digest.update(f"{path.absolute()}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def stored(name: str, key: Mapping[str, Any], make: Callable[[], Arrays]) -> Arrays:
    """The arrays that `make` returns, mapped from disk; it is called only where no earlier process
    has left them.

    Args: name: the dataset's, for messages. key: all that decides the arrays, as JSON: the loader,
        its settings, `signature` of the source files. make: decodes the data into named arrays
        (numbers or fixed-width text, no objects).

    The arrays can be written to, which changes neither the disk nor other processes;
    `torch.from_numpy` does not copy them. A damaged entry is made anew, and a cache that cannot be
    written is left out; both are logged."""
    from filelock import FileLock

    named = json.dumps([_FORMAT, name, key], sort_keys=True)
    place = root() / "data" / hashlib.sha256(named.encode()).hexdigest()[:32]
    if (found := _load(place, named)) is not None:
        return found
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        turn = FileLock(f"{place}.lock").acquire()
    except (OSError, NotImplementedError) as error:  # some file systems have no locks
        _unwritable(place.parent, str(error))
        return make()
    with turn:
        return found if (found := _load(place, named)) is not None else _save(place, named, make())


def _load(place: Path, named: str) -> Arrays | None:
    """The arrays at `place`; None where there are none, or they are damaged (which is logged)."""
    try:
        if not place.is_dir():
            return None
        header = json.loads((place / _HEADER).read_text())
        arrays = {
            name: np.asarray(np.load(place / f"{name}.npy", mmap_mode="c"))
            for name in header["arrays"]
        }
        if (
            header["key"] != named
            or {name: _describe(array) for name, array in arrays.items()} != header["arrays"]
        ):
            raise ValueError("its header describes other arrays")
        return arrays
    # what a damaged header or array raises
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        log.warning("the cached data %s are damaged (%s): they are made anew", place, error)
    return None


def _save(place: Path, named: str, arrays: Arrays) -> Arrays:
    """Saves the arrays and maps them; in memory as they are where that fails. The caller holds the
    lock of `place`."""
    try:
        shutil.rmtree(place, ignore_errors=True)  # a damaged entry
        with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
            whole = Path(scratch, "entry")
            whole.mkdir()
            for name, array in arrays.items():
                np.save(whole / f"{name}.npy", array, allow_pickle=False)
            (whole / _HEADER).write_text(
                json.dumps(
                    {
                        "key": named,
                        "arrays": {name: _describe(array) for name, array in arrays.items()},
                    }
                )
            )
            whole.replace(place)  # atomic: a reader sees the whole entry or none
    except OSError as error:
        _unwritable(place.parent, str(error))
        return arrays
    return _load(place, named) or arrays


def _describe(array: np.ndarray) -> list[Any]:
    return [array.dtype.str, list(array.shape)]


@cache  # once per folder
def _unwritable(place: Path, error: str) -> None:
    log.warning(
        "decoded data are not cached, each process decodes its own: %s cannot be written (%s)",
        place,
        error,
    )
