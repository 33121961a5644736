"""Sends messages' tensors between processes of one machine, in files mapped to shared memory.

The pipe carries the message with a `Slice` in place of each tensor. So a model is written once for
a whole cohort, and clients read it in place.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedhet.core.messages import Broadcast, Upload
from fedhet.data.storage import unwritable

ALIGNED = 64  # bytes, so that vector instructions work on whole cache lines

Message = TypeVar("Message", Broadcast, Upload)


class Slice(NamedTuple):
    """The place of a tensor in a file.

    Attributes:
        file: the path of the file.
        start: the tensor's first byte in the file.
        dtype: the tensor's type.
        shape: the tensor's shape.
    """

    file: str
    start: int
    dtype: torch.dtype
    shape: torch.Size


class Writer:
    """Writes the tensors of messages to a file `<path>.<its size>`.

    Each call overwrites the tensors of the call before.
    """

    def __init__(self, path: Path) -> None:
        self._path = self._file = path
        self._memory = torch.empty(0, dtype=torch.uint8)

    def write(self, messages: Sequence[Message]) -> list[Message]:
        """Write the messages' tensors, and return the messages with slices in place of tensors.

        A tensor that several messages share is written once. No reader may still need the messages
        of an earlier call.
        """
        tensors: dict[int, Tensor] = {}
        for message in messages:
            _mapped(message, lambda t: tensors.setdefault(id(t), t))
        sizes = [(t.nbytes // ALIGNED + 1) * ALIGNED for t in tensors.values()]
        if sum(sizes) > len(self._memory):
            self._grow(sum(sizes))
        slices = {}
        for (key, t), start in zip(tensors.items(), accumulate(sizes, initial=0), strict=False):
            slices[key] = Slice(str(self._file), start, t.dtype, t.shape)
            _view(self._memory, slices[key]).copy_(t.detach())
        return [_mapped(message, lambda t: slices[id(t)]) for message in messages]

    def _grow(self, size: int) -> None:
        """Continue in a file of this size."""
        self._file.unlink(missing_ok=True)
        self._file = self._path.with_name(f"{self._path.name}.{size}")
        try:
            with self._file.open("wb") as file:
                # On a full disk this raises an error. Without it, the first use of the memory would
                # kill the process.
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise unwritable(self._file, error) from error
        self._memory = _mapping(str(self._file), size)


class Reader:
    """Reads the tensors that a `Writer` of another process has written.

    Args:
        copy: whether messages get copies of the tensors; else they get views of the shared memory,
            which must not be changed.
    """

    def __init__(self, *, copy: bool) -> None:
        self._copy = copy
        self._open: tuple[str, Tensor] = "", torch.empty(0)  # the last file, and its memory

    def message(self, message: Message) -> Message:
        """Return the message with tensors in place of slices."""
        return _mapped(message, self._get)

    def _get(self, where: Slice) -> Tensor:
        if self._open[0] != where.file:
            self._open = where.file, _mapping(where.file, Path(where.file).stat().st_size)
        tensor = _view(self._open[1], where)
        return tensor.clone() if self._copy else tensor


def _mapping(file: str, size: int) -> Tensor:
    """Return the file's bytes as a tensor in shared memory."""
    return torch.from_file(file, shared=True, size=size, dtype=torch.uint8)


def _view(memory: Tensor, where: Slice) -> Tensor:
    size = where.shape.numel() * where.dtype.itemsize
    return memory[where.start : where.start + size].view(where.dtype).view(where.shape)


def _mapped(message: Message, convert: Any) -> Message:
    """Return the message with `convert` applied to each of its tensors or slices."""

    def each(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: each(item) for name, item in value.items()}
        return convert(value) if isinstance(value, Tensor | Slice) else value

    return replace(message, weights=each(message.weights), extras=each(message.extras))
