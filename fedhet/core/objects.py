"""Reads samples given as objects into tensors: pairs (x, y), and map-style data sets.

A map-style data set has `__len__` and `__getitem__`, and its items are pairs (x, y) or, as in
Hugging Face's data sets, dictionaries. Examples: torch's TensorDataset and Subset, torchvision's
data sets with a transform, and a list of pairs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset

from fedhet.core import streams
from fedhet.core.errors import DataError

Pair = tuple[Tensor, Tensor]
# The keys that mark the target in an item that is a dictionary.
TARGETS = ("label", "labels", "target", "targets", "y")


def read(value: Any, where: str, pid: int = -1) -> Pair:
    """Return the samples as tensors x (n, ...) and y (n, ...).

    Each sample of a data set is read once, in order, into tensors that are allocated for all
    samples. If reading draws random numbers (a random crop, for example), they come from a stream
    of fedhet's own, so that the samples are the same every time.

    Args:
        value: a pair (x, y) of tensors, arrays or lists, or a map-style data set.
        where: the owner of the samples, for messages: "client 3, train".
        pid: the number of the client; each client has its own random stream.

    Raises:
        DataError: the value is neither of them; or a sample is not a pair of numbers or arrays, has
            another shape or type than the first sample, or cannot be read.
    """
    if _is_pair(value):
        inputs, targets = value
        return pair(inputs, targets, f"{where}: ")
    if type(value) is TensorDataset and len(value.tensors) == 2:
        x, y = value.tensors
        return x, y
    _check_map_style(value, where)
    with _own_draws(where, pid):
        return _stacked(value, where)


def pair(x: Any, y: Any, where: str = "") -> Pair:
    """Return the inputs and the targets of all samples as two tensors of equal length.

    Args:
        x, y: tensors, arrays, or lists of numbers, arrays or tensors.
        where: the owner of the samples, for messages: "client 3, train: ".

    Raises:
        DataError: x or y is something else, or their lengths differ.
    """
    tensors = _whole(x, f"{where}x", table=2), _whole(y, f"{where}y")
    lengths = [len(t) if t.ndim else 1 for t in tensors]
    if lengths[0] != lengths[1] or not all(t.ndim for t in tensors):
        raise DataError(
            f"{where}{lengths[0]} inputs but {lengths[1]} targets, of shapes"
            f" {tuple(tensors[0].shape)} and {tuple(tensors[1].shape)}; each sample needs an input"
            " and a target"
        )
    return tensors


def are_pixels(x: Tensor | np.ndarray) -> bool:
    """Whether inputs (n, ...) are pixels 0 .. 255: images (n, H, W) or (n, C, H, W) of uint8.

    All other inputs are plain numbers, also a table (n, F) of uint8.
    """
    return x.ndim > 2 and x.dtype in (torch.uint8, np.uint8)


def length(value: Any) -> int:
    """Return the number of samples of a pair or a data set; 1 if it has no length."""
    values = value[1] if _is_pair(value) else value
    return len(values) if hasattr(values, "__len__") else 1


def _is_pair(value: Any) -> bool:
    """Whether this is a pair (x, y) of all samples, and not a list or tuple of two samples."""
    two = isinstance(value, tuple | list) and len(value) == 2
    return two and not any(isinstance(part, tuple | Mapping) for part in value)


def _check_map_style(value: Any, where: str) -> None:
    by_number = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    others = isinstance(value, str | Mapping | Tensor | np.ndarray | IterableDataset)
    if others or not by_number:
        raise DataError(
            f"{where} is {_what(value)}; expected a pair (x, y), or a data set with __len__ and"
            " __getitem__. Instead of a DataLoader, give its `dataset`; instead of a DatasetDict,"
            " one of its splits; instead of an iterable, list(data)"
        )


@contextmanager
def _own_draws(where: str, pid: int) -> Iterator[None]:
    """Seed the global generators of torch, numpy and Python, and restore them at the end."""
    seed = streams.integer(0, "objects", phase=where.rpartition(" ")[2], pid=pid)
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _stacked(items: Any, where: str) -> Pair:
    """Read every item into two tensors that are allocated for all items at once."""
    if not len(items):
        raise DataError(f"{where}: the data set is empty; expected at least one sample")
    stacked: list[Tensor] = []
    for index in range(len(items)):
        place = f"{where}, sample {index}"
        try:
            item = items[index]
        except Exception as error:
            raise DataError(
                f"{place}: the data set, of type {type(items).__name__}, raised"
                f" {type(error).__name__}: {_first_line(error)}"
            ) from error
        parts = [
            _numbers(part, f"{place}: {name}", 1 if name == "x" else 0)
            for part, name in zip(_item_pair(item, place), "xy", strict=True)
        ]
        if not stacked:
            stacked = [part.new_empty((len(items), *part.shape), device="cpu") for part in parts]
        for rows, part, name in zip(stacked, parts, "xy", strict=True):
            _check_like(part, rows[0], f"{place}: {name}")
            rows[index] = part
    x, y = stacked
    return x, y


def _item_pair(item: Any, place: str) -> Sequence[Any]:
    """Return the input and the target of an item."""
    if isinstance(item, Mapping) and len(item) == 2:
        target = next((name for name in item if name in TARGETS), list(item)[1])
        (x,) = item.keys() - {target}
        return item[x], item[target]
    if isinstance(item, tuple | list) and len(item) == 2:
        return item
    raise DataError(
        f"{place} is {_what(item)}; expected a pair (x, y), or a dictionary of only an input and"
        " its target, as from data.select_columns(['image', 'label'])"
    )


def _check_like(value: Tensor, first: Tensor, what: str) -> None:
    """Refuse an input or a target that differs in shape or type from the first sample's."""
    if value.shape != first.shape or value.dtype != first.dtype:
        raise DataError(
            f"{what} is {_what(value)}, but in sample 0 it is {_what(first)}; all samples must have"
            " the same shape and type"
        )


def _whole(values: Any, what: str, table: int = 0) -> Tensor:
    """Return the inputs or the targets of all samples as a tensor; see `_numbers`."""
    if isinstance(values, list | tuple) and values and not isinstance(values[0], int | float):
        rows = [_numbers(value, f"{what}[{row}]", table - 1) for row, value in enumerate(values)]
        for row, value in enumerate(rows):
            _check_like(value, rows[0], f"{what}[{row}]")
        return torch.stack(rows)
    return _numbers(values, what, table)


def _numbers(value: Any, what: str, table: int = 0) -> Tensor:
    """Return a number, or an array of numbers, as a tensor.

    NumPy's default type, float64, becomes torch's default type. A table of inputs, which has
    `table` dimensions, is an exception: it stays exact until it is normalised.
    """
    if isinstance(value, Tensor):
        return value.detach()
    problem = (
        f"{what} is {_what(value)}; expected a number, or an array or tensor of numbers. Convert"
        " images with transform=torchvision.transforms.ToTensor() or data.with_format('torch')"
    )
    image = type(value).__module__.partition(".")[0] == "PIL"
    if image or isinstance(value, str | bytes | None | Mapping):
        raise DataError(problem)
    try:
        # torch refuses negative strides, and warns about read-only arrays.
        array = value
        if hasattr(value, "__array__"):
            array = np.require(value, requirements=["C", "W"])
        elif table > 0:  # torch would convert Python's numbers to float32
            array = np.asarray(value)
        tensor = torch.as_tensor(array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{problem}: {_first_line(error)}") from error
    exact = tensor.dtype != torch.float64 or (table > 0 and tensor.ndim == table)
    return tensor if exact else tensor.to(torch.get_default_dtype())


def _what(value: Any) -> str:
    kind = type(value).__name__
    if isinstance(value, Tensor | np.ndarray):
        return f"a {kind} of shape {tuple(value.shape)} and type {value.dtype}"
    if isinstance(value, tuple | list):
        return f"of type {kind} of {len(value)}"
    return f"the text {value[:40]!r}" if isinstance(value, str) else f"of type {kind}"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
