"""Disks that become full: one that is pretended, and a file system of a given size."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import safetensors.torch

FULL = os.strerror(errno.ENOSPC)


class FullFile:
    """A file on a full disk: it takes half of what is written, then no more."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> FullFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, data: Any) -> int:
        self._file.write(data[: len(data) // 2])
        self._file.flush()
        raise OSError(errno.ENOSPC, FULL)


class Disk:
    """The disk below a folder, which is full after so many files; what they take can be reused."""

    def __init__(self, folder: Path, room: int, patch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._room = room
        self._open: Callable[..., Any] = io.open
        patch.setattr(io, "open", self.open)
        for module, name in ((safetensors.torch, "save_file"), (pyarrow.parquet, "write_table")):
            patch.setattr(module, name, self.limited(getattr(module, name)))

    def is_full(self) -> bool:
        self._room -= 1
        return self._room < 0

    def open(self, path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        file = self._open(path, mode, *args, **options)
        inside = isinstance(path, Path) and path.is_relative_to(self._folder)
        takes_room = inside and any(letter in mode for letter in "wa")
        return FullFile(file) if takes_room and self.is_full() else file

    def limited(self, write: Callable[..., None]) -> Callable[..., None]:
        """A function of another language, which opens its file itself."""

        def half(content: Any, path: Path) -> None:
            write(content, path)
            if self.is_full():
                os.truncate(path, path.stat().st_size // 2)
                raise OSError(errno.ENOSPC, FULL)

        return half
