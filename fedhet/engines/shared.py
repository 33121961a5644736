"""Tensors of messages between processes of one machine, in files that all of them map to memory.

What goes through a pipe is the message with a `Slice` in place of each tensor. So a model is
written once for a whole cohort and read where it is.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedhet.core.messages import Broadcast, Upload
from fedhet.data.storage import unwritable

ALIGNED = 64  # bytes, so that vector instructions work on whole cache lines
SMALLEST = 2**20  # bytes of a file

Message = TypeVar("Message", Broadcast, Upload)


class Slice(NamedTuple):
    """Where a tensor is.

    Attributes:
        file: the path of the file.
        size: the size of the file in bytes.
        start: the tensor's first byte in the file.
        dtype: its type.
        shape: its shape.
    """

    file: str
    size: int
    start: int
    dtype: torch.dtype
    shape: torch.Size


class Writer:
    """Writes the tensors of messages to files `<path>.0`, `<path>.1`, ...

    Each file is at least twice as large as the previous one. What was written stays until `clear`.
    A tensor that several messages share is written once.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = -1  # of the file that is written to
        self._size = 0
        self._used = 0
        self._memory = torch.empty(0, dtype=torch.uint8)
        # Each tensor is kept beside its slice, so that its id cannot be given to another.
        self._written: dict[int, tuple[Tensor, Slice]] = {}

    def clear(self) -> None:
        """Forget what was written; no reader may still need it."""
        for number in range(self._number):
            self._file(number).unlink(missing_ok=True)
        self._used = 0
        self._written = {}

    def message(self, message: Message) -> Message:
        """The message with slices in place of its tensors."""
        return _mapped(message, self._put)

    def _file(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")

    def _put(self, tensor: Tensor) -> Slice:
        if id(tensor) not in self._written:
            if self._used + tensor.nbytes > self._size:
                self._grow(tensor.nbytes)
            start = self._used
            self._used = -(-(start + tensor.nbytes) // ALIGNED) * ALIGNED
            file = str(self._file(self._number))
            where = Slice(file, self._size, start, tensor.dtype, tensor.shape)
            _view(self._memory, where).copy_(tensor.detach())
            self._written[id(tensor)] = tensor, where
        return self._written[id(tensor)][1]

    def _grow(self, needed: int) -> None:
        """Continue in a new file, with room for `needed` bytes."""
        self._number += 1
        self._size = max(2 * self._size, needed, SMALLEST)
        self._used = 0
        path = self._file(self._number)
        try:
            with path.open("wb") as file:
                # On a full disk this is an error; without it, the first use would end the process.
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, self._size)
        except OSError as error:
            raise unwritable(path, error) from error
        self._memory = _mapping(str(path), self._size)


class Reader:
    """Reads what a `Writer` of another process has written.

    Args:
        copy: whether messages get copies of the tensors; else they get views of the shared memory,
            which must not be changed.
    """

    def __init__(self, *, copy: bool) -> None:
        self._copy = copy
        self._open: tuple[str, Tensor] = "", torch.empty(0)  # the last file, and its memory

    def message(self, message: Message) -> Message:
        """The message with its tensors in place of slices."""
        return _mapped(message, self._get)

    def _get(self, where: Slice) -> Tensor:
        if self._open[0] != where.file:
            self._open = where.file, _mapping(where.file, where.size)
        tensor = _view(self._open[1], where)
        return tensor.clone() if self._copy else tensor


def _mapping(file: str, size: int) -> Tensor:
    """The file's bytes as a tensor in shared memory."""
    return torch.from_file(file, shared=True, size=size, dtype=torch.uint8)


def _view(memory: Tensor, where: Slice) -> Tensor:
    size = where.shape.numel() * where.dtype.itemsize
    return memory[where.start : where.start + size].view(where.dtype).view(where.shape)


def _mapped(message: Message, convert: Any) -> Message:
    """The message with `convert` applied to each of its tensors or slices."""

    def each(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: each(item) for name, item in value.items()}
        return convert(value) if isinstance(value, Tensor | Slice) else value

    return replace(message, weights=each(message.weights), extras=each(message.extras))
