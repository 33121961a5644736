"""Copies between the devices, and what else makes the CPU wait for the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from pretend_device.rules import DEVICE, INDEXING, leaves, place

TO_DEVICE = f"cpu -> {DEVICE}"
TO_HOST = f"{DEVICE} -> cpu"
# The CPU waits for CUDA beside a copy where the size of the result, or whether there is an error,
# depends on values.
WAITING = {
    "_linalg_check_errors",
    "_unique2",
    "allclose",
    "bincount",
    "equal",
    "masked_select",
    "multinomial",
    "nonzero",
    "repeat_interleave.Tensor",
    "unique_consecutive",
    "unique_dim",
}


class Copy(NamedTuple):
    """What moves data between the devices, or makes the CPU wait for the device.

    Attributes:
        operation: its name in torch's table.
        way: "cpu -> pretend:0" or "pretend:0 -> cpu", with ", asynchronous" where non_blocking is
            true; "wait" where only a size or a check travels.
        place: the line.
    """

    operation: str
    way: str
    place: str


Copies = Counter[Copy]
_counting: list[Copies] = []


@contextmanager
def count_copies() -> Iterator[Copies]:
    """Count copies inside the block."""
    copies: Copies = Counter()
    _counting.append(copies)
    try:
        yield copies
    finally:
        _counting[:] = [one for one in _counting if one is not copies]  # others may be equal


def count(
    name: str, args: Sequence[Any], kwargs: dict[str, Any], on_device: Callable[[Any], bool]
) -> None:
    """Count the copies that an operation with these arguments makes."""
    if not _counting:
        return
    for way in _ways(name, args, kwargs, on_device):
        for copies in _counting:
            copies[Copy(name, way, place())] += 1


def _ways(
    name: str, args: Sequence[Any], kwargs: dict[str, Any], on_device: Callable[[Any], bool]
) -> Iterator[str]:
    if name in ("copy_", "_foreach_copy_"):
        asynchronous = ", asynchronous" if any(args[2:]) else ""
        for to, source in zip(leaves(args[0]), leaves(args[1]), strict=True):
            if on_device(to) != on_device(source):
                yield (TO_DEVICE if on_device(to) else TO_HOST) + asynchronous
    elif name == "_to_copy":
        if torch.device(kwargs.get("device") or DEVICE).type == "cpu":
            yield TO_HOST + (", asynchronous" if kwargs.get("non_blocking") else "")
    elif name == "_local_scalar_dense":
        yield TO_HOST
    elif name in INDEXING and on_device(args[0]):
        for index in args[1]:
            if index is not None and not on_device(index):
                yield TO_DEVICE
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                yield "wait"
    elif name in WAITING:
        yield "wait"
