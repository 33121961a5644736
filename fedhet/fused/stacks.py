"""Several values of one form as one: each of their tensors has one of them in every row.

Values are trees of any depth, of tensors, numbers and texts in dicts, lists, tuples and objects.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

PLAIN = (int, str, bool, type(None))
_LAYERS: WeakKeyDictionary[nn.Module, Hashable] = WeakKeyDictionary()


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


def layers(module: nn.Module) -> Hashable:
    """What modules must have in common so that one of them may compute for all."""
    known = _LAYERS.get(module)
    if known is None:
        tensors = [(name, t.shape, t.dtype) for name, t in module.state_dict().items()]
        known = _LAYERS[module] = repr(module), tuple(tensors)
    return known


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


def put_back(value: Any, row: int, into: Any, moves: list[tuple[Tensor, Tensor]]) -> Any:
    """Give one of the values that were stacked what its row of `value` has become.

    Args:
        value: the stack.
        row: which of its rows.
        into: the value.
        moves: gets the tensors of the value, each with what is to be copied into it.

    Returns:
        `into`, or what replaces it.
    """
    if isinstance(value, Tensor):
        if isinstance(into, Tensor):
            moves.append((into, value[row]))
            return into
        return float(value[row]) if isinstance(into, float) else value[row].clone()
    if isinstance(value, (float, *PLAIN)):
        return value
    if isinstance(value, dict):
        given = into or dict.fromkeys(value)
        return {key: put_back(one, row, given[key], moves) for key, one in value.items()}
    if isinstance(value, list | tuple):
        given = into or [None] * len(value)
        pairs = zip(value, given, strict=True)
        return type(value)(put_back(one, row, to, moves) for one, to in pairs)
    for key, one in vars(value).items():
        object.__setattr__(into, key, put_back(one, row, vars(into)[key], moves))
    return into


def _changed(value: Any, attributes: dict[str, Any]) -> Any:
    other = copy(value)
    for key, one in attributes.items():
        object.__setattr__(other, key, one)  # also of frozen dataclasses
    return other
