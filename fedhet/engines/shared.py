"""Tensors of messages between processes of one machine: they lie in a file that all of them map
into their memory.

What goes through a pipe is the message with a `Slice` in place of each tensor, so that a model is
written once for a whole cohort and read where it lies."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedhet.messages import Broadcast, Update

ALIGNED = 64  # bytes, so that vector instructions find whole lines

Message = TypeVar("Message", Broadcast, Update)


class Slice(NamedTuple):
    """Where a tensor lies."""

    file: str
    size: int  # of the file, in bytes
    at: int
    dtype: torch.dtype
    shape: torch.Size


class Writer:
    """Lays the tensors of messages into files `<path>.0`, `<path>.1`, ..., each at least twice as
    large as the last one.

    What it has written stays until `clear`. A tensor that several messages share is written once.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._number, self._size, self._used = path, -1, 0, 0
        self._memory = torch.empty(0, dtype=torch.uint8)
        # the tensor beside its slice, so that its id cannot be another's
        self._written: dict[int, tuple[Tensor, Slice]] = {}

    def clear(self) -> None:
        """Forget what was written; the readers must be done with it."""
        for number in range(self._number):
            self._file(number).unlink(missing_ok=True)
        self._used, self._written = 0, {}

    def message(self, message: Message) -> Message:
        """The message with slices for its tensors."""
        return _mapped(message, self._put)

    def _file(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")

    def _put(self, tensor: Tensor) -> Slice:
        if id(tensor) not in self._written:
            end = self._used + tensor.nbytes
            if end > self._size:
                self._grow(tensor.nbytes)
                end = tensor.nbytes
            at, self._used = end - tensor.nbytes, -(-end // ALIGNED) * ALIGNED
            where = Slice(str(self._file(self._number)), self._size, at, tensor.dtype, tensor.shape)
            _view(self._memory, where).copy_(tensor.detach())
            self._written[id(tensor)] = tensor, where
        return self._written[id(tensor)][1]

    def _grow(self, needed: int) -> None:
        self._number, self._size, self._used = (
            self._number + 1,
            max(2 * self._size, needed, 2**20),
            0,
        )
        path = self._file(self._number)
        with path.open("wb") as file:
            if hasattr(
                os, "posix_fallocate"
            ):  # a full disk is an error here, and would end the process on first use
                os.posix_fallocate(file.fileno(), 0, self._size)
        self._memory = _mapping(str(path), self._size)


class Reader:
    """Reads what a `Writer` of another process has written."""

    def __init__(self, *, copy: bool) -> None:
        self._copy = copy
        self._open: tuple[str, Tensor] = "", torch.empty(0)

    def message(self, message: Message) -> Message:
        """The message with its tensors: copies, or views of the shared memory that nobody may
        change."""
        return _mapped(message, self._get)

    def _get(self, where: Slice) -> Tensor:
        if self._open[0] != where.file:
            self._open = where.file, _mapping(where.file, where.size)
        found = _view(self._open[1], where)
        return found.clone() if self._copy else found


def _mapping(file: str, size: int) -> Tensor:
    return torch.from_file(file, shared=True, size=size, dtype=torch.uint8)


def _view(memory: Tensor, where: Slice) -> Tensor:
    size = where.shape.numel() * where.dtype.itemsize
    return memory[where.at : where.at + size].view(where.dtype).view(where.shape)


def _mapped(message: Message, convert: Any) -> Message:
    def each(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: each(item) for name, item in value.items()}
        return convert(value) if isinstance(value, Tensor | Slice) else value

    return replace(message, weights=each(message.weights), extras=each(message.extras))
