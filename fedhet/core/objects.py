"""Reads samples given as objects into tensors: pairs (x, y), and map-style data sets.

A map-style data set has `__len__` and `__getitem__`, and its items are pairs (x, y): torch's
TensorDataset and Subset, torchvision's with a transform, a list of pairs, and Hugging Face's, whose
items are dictionaries.
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
# The names by which the target is known in an item that is a dictionary.
TARGETS = ("label", "labels", "target", "targets", "y")


def read(value: Any, where: str, pid: int = -1) -> Pair:
    """Return the samples as tensors x (n, ...) and y (n, ...).

    Each sample of a data set is read once, in order, into memory for all of them. What its items
    draw at random (a random crop, for example) comes from a stream of fedhet's own, so that it is
    the same each time.

    Args:
        value: a pair (x, y) of tensors, arrays or lists, or a map-style data set.
        where: whose samples they are, for messages: "client 3, train".
        pid: the number of the client, which has its own stream.

    Raises:
        DataError: the value is neither; or a sample is not a pair of numbers or arrays, has another
            shape or type than the first one, or cannot be read.
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
    """Return the inputs and the targets of all samples as tensors with as many rows.

    Args:
        x, y: tensors, arrays, or lists of numbers, arrays or tensors.
        where: whose samples they are, for messages: "client 3, train: ".

    Raises:
        DataError: they are something else, or differ in length.
    """
    tensors = _whole(x, f"{where}x", table=2), _whole(y, f"{where}y")
    lengths = [len(t) if t.ndim else 1 for t in tensors]
    if lengths[0] != lengths[1] or not all(t.ndim for t in tensors):
        raise DataError(
            f"{where}{lengths[0]} inputs but {lengths[1]} targets, of shapes"
            f" {tuple(tensors[0].shape)} and {tuple(tensors[1].shape)}; each sample needs both"
        )
    return tensors


def are_pixels(x: Tensor | np.ndarray) -> bool:
    """Whether inputs (n, ...) are pixels 0 .. 255: images (n, H, W) or (n, C, H, W) of uint8.

    All others are the numbers that they say, also a table (n, F) of uint8.
    """
    return x.ndim > 2 and x.dtype in (torch.uint8, np.uint8)


def length(value: Any) -> int:
    """Return the number of samples of a pair or a data set, as far as it says; else 1."""
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
            " __getitem__: of a DataLoader its `dataset`, of a DatasetDict one of its splits, of"
            " what is only iterated over list(data)"
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
    """Read every item into two tensors that are allocated for all of them at once."""
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
        f"{place} is {_what(item)}; expected a pair (x, y), or a dictionary of an input and its"
        " target: data.select_columns(['image', 'label'])"
    )


def _check_like(one: Tensor, first: Tensor, what: str) -> None:
    """Refuse an input or a target of another form than that of the first sample."""
    if one.shape != first.shape or one.dtype != first.dtype:
        raise DataError(
            f"{what} is {_what(one)}, but that of sample 0 {_what(first)}; all samples must have"
            " one shape and type"
        )


def _whole(values: Any, what: str, table: int = 0) -> Tensor:
    """Return the inputs or the targets of all samples as a tensor; see `_numbers`."""
    if isinstance(values, list | tuple) and values and not isinstance(values[0], int | float):
        rows = [_numbers(value, f"{what}[{row}]", table - 1) for row, value in enumerate(values)]
        for row, one in enumerate(rows):
            _check_like(one, rows[0], f"{what}[{row}]")
        return torch.stack(rows)
    return _numbers(values, what, table)


def _numbers(value: Any, what: str, table: int = 0) -> Tensor:
    """Return a number, or an array of numbers, as a tensor.

    NumPy's default, float64, becomes torch's, but for a table of inputs, which has `table`
    dimensions: it stays exact until it is normalised.
    """
    if isinstance(value, Tensor):
        return value.detach()
    problem = (
        f"{what} is {_what(value)}; expected a number, or an array or tensor of numbers: of images"
        " what transform=torchvision.transforms.ToTensor() or data.with_format('torch') makes"
    )
    image = type(value).__module__.partition(".")[0] == "PIL"
    if image or isinstance(value, str | bytes | None | Mapping):
        raise DataError(problem)
    try:
        # torch takes no negative strides, and warns of arrays that must not be written.
        array = value
        if hasattr(value, "__array__"):
            array = np.require(value, requirements=["C", "W"])
        elif table > 0:  # torch would make float32 of Python's numbers
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
