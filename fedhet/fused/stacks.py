"""Several values of one form as one: each of their tensors has one of them in every row.

Values are trees of any depth, of tensors, numbers and texts in dicts, lists, tuples and objects.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (int, str, bool, type(None))


def form(value: Any) -> Hashable:
    """What values must have in common to be stacked: all but the entries of tensors, and floats."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.device
    if isinstance(value, float):
        return float
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, dict):
        return tuple((key, form(one)) for key, one in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(form, value))
    return type(value), form(vars(value))


def layers(module: nn.Module | None) -> Hashable:
    """What modules must have in common to compute the same function of their tensors."""
    if module is None:
        return None
    kinds = (float, tuple, *PLAIN)
    return tuple(
        (name, type(layer), repr([one for one in vars(layer).values() if isinstance(one, kinds)]))
        for name, layer in module.named_modules()
    )


def stack(values: Sequence[Any], seen: dict[Hashable, Tensor]) -> Any:
    """Stack values of one form. Numbers that differ become a tensor (K,), float64.

    Args:
        values: K of them.
        seen: the tensors that have been stacked already, so that those of several names stay one.
    """
    first = values[0]
    if isinstance(first, Tensor):
        key = tuple(map(id, values))
        if key not in seen:
            seen[key] = torch.stack([one.detach() for one in values])
        return seen[key]
    if isinstance(first, float):
        same = all(one == first for one in values)
        return first if same else torch.tensor(values, dtype=torch.float64)
    if isinstance(first, PLAIN):
        return first
    if isinstance(first, dict):
        return {key: stack([one[key] for one in values], seen) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(stack(each, seen) for each in zip(*values, strict=True))
    return _changed(first, stack([vars(one) for one in values], seen))


def numbers(value: Any) -> tuple[float, ...]:
    """The floats in the value that is stacked, which are the same for all."""
    if isinstance(value, float):
        return (value,)
    if isinstance(value, (Tensor, *PLAIN)):
        return ()
    if isinstance(value, dict):
        value = list(value.values())
    elif not isinstance(value, list | tuple):
        value = [vars(value)]
    return tuple(number for one in value for number in numbers(one))


def mapped(f: Callable[[Tensor], Tensor], value: Any, seen: dict[int, Tensor] | None = None) -> Any:
    """The value with f(t) in the place of every tensor t."""
    seen = {} if seen is None else seen
    if isinstance(value, Tensor):
        if id(value) not in seen:
            seen[id(value)] = f(value)
        return seen[id(value)]
    if isinstance(value, (float, *PLAIN)):
        return value
    if isinstance(value, dict):
        return {key: mapped(f, one, seen) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(mapped(f, one, seen) for one in value)
    return _changed(value, mapped(f, vars(value), seen))


def at_rows(value: Any, rows: slice | Tensor) -> Any:
    """Some of the values that were stacked, as a stack of their own; a slice is a view."""
    return mapped(lambda t: t[rows], value)


def put_back(value: Any, row: int, into: Any) -> Any:
    """Give one of the values that were stacked what its row of `value` has become.

    Returns:
        `into`, whose tensors have been changed in place, or what replaces it.
    """

    def one_of_them(t: Tensor, to: Any) -> Any:
        if isinstance(to, Tensor):
            return to.copy_(t[row])
        return float(t[row]) if isinstance(to, float) else t[row].clone()

    return _put(value, into, one_of_them)


def put_rows(value: Any, rows: slice | Tensor, into: Any) -> None:
    """Give these rows of `into`, in place, what they have become in a stack of their own."""

    def some_of_them(t: Tensor, to: Tensor) -> Tensor:
        to[rows] = t
        return to

    _put(value, into, some_of_them)


def _put(value: Any, into: Any, leaf: Callable[[Tensor, Any], Any]) -> Any:
    if isinstance(value, Tensor):
        return leaf(value, into)
    if isinstance(value, (float, *PLAIN)):
        return value
    if isinstance(value, dict):
        given = into or dict.fromkeys(value)
        return {key: _put(one, given[key], leaf) for key, one in value.items()}
    if isinstance(value, list | tuple):
        given = into or [None] * len(value)
        return type(value)(_put(one, to, leaf) for one, to in zip(value, given, strict=True))
    for key, one in vars(value).items():
        object.__setattr__(into, key, _put(one, vars(into)[key], leaf))
    return into


def _changed(value: Any, attributes: dict[str, Any]) -> Any:
    other = copy(value)
    for key, one in attributes.items():
        object.__setattr__(other, key, one)  # also of frozen dataclasses
    return other
