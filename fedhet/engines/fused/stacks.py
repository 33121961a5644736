"""Stacks several values of one form into one value; its tensors have one row per original value.

A value is a tree of any depth: tensors, numbers and texts in dicts, lists, tuples and objects.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from types import BuiltinFunctionType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

PLAIN = (int, float, str, bool, type(None))
# Attributes of optimisers that may differ between stacked values; COUNT is the number of steps.
RATES, COUNT = ("lr", "factor"), "t"
_OF_ALL = vars(nn.Module()).keys()  # attributes that every torch module has
_LAYERS: WeakKeyDictionary[nn.Module, Hashable] = WeakKeyDictionary()


def form(value: Any) -> Hashable:
    """Return a key that values must share to be stacked.

    Everything counts for the key, except the entries of tensors and the rates.
    """
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.device
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, dict):
        return tuple((k, None if is_rate(k, item) else form(item)) for k, item in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(form, value))
    return type(value), form(vars(value))


def is_rate(key: object, value: object) -> bool:
    """Whether an attribute of an optimiser is a number that may differ between stacked values."""
    return (key in RATES or key == COUNT) and isinstance(value, int | float)


def layers(module: nn.Module) -> Hashable:
    """Return a key that modules must share so that one of them can compute for all."""
    known = _LAYERS.get(module)
    if known is None:
        state = module.state_dict()
        tensors = [(name, t.shape, t.dtype) for name, t in state.items()]
        # Classes and attributes count, too: a class may be redefined in this process, and a layer's
        # repr may omit a number.
        classes = tuple(map(type, module.modules()))
        attributes = [
            (key, _compared(value))
            for layer in module.modules()
            for key, value in vars(layer).items()
            if key not in _OF_ALL
        ]
        # Only tensors of the state dict are stacked; other buffers must be identical objects.
        apart = [id(t) for name, t in module.named_buffers() if name not in state]
        known = repr(module), classes, tuple(attributes), tuple(tensors), tuple(apart)
        _LAYERS[module] = known
    return known


def _compared(value: Any) -> Hashable:
    """Return a key for a layer's attribute.

    It is a function itself, the repr of a plain value, or the id of any other object.
    """
    if isinstance(value, (dict, list, set, tuple, *PLAIN)):
        return repr(value)
    return value if isinstance(value, FunctionType | BuiltinFunctionType | type) else id(value)


def stack(values: Sequence[Any]) -> Any:
    """Stack values of one form. Rates become a float64 tensor (K,), even if all are equal.

    Args:
        values: the K values.
    """
    return _combined(lambda each: torch.stack([t.detach() for t in each]), values, {})


def mapped(f: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return the value with f(t) in place of every tensor t."""
    return _combined(lambda each: f(*each), [value], {})


def tensors(value: Any) -> list[Tensor]:
    """Return all tensors of the value, each of them once."""
    found: dict[Hashable, Tensor] = {}
    _combined(lambda each: each[0], [value], found)
    return list(found.values())


def _combined(
    f: Callable[[Sequence[Tensor]], Tensor], values: Sequence[Any], seen: dict[Hashable, Tensor]
) -> Any:
    """Return a value of the same form, with f(the values' tensors) in place of each tensor.

    Args:
        f: a function of the values' tensors at one place.
        values: values of one form.
        seen: the results of f so far, so that a tensor with several names stays one tensor.
    """
    first = values[0]
    if isinstance(first, Tensor):
        key = tuple(map(id, values))
        if key not in seen:
            seen[key] = f(values)
        return seen[key]
    if isinstance(first, PLAIN):
        return first
    if isinstance(first, dict):
        columns = {key: [value[key] for value in values] for key in first}
        return {
            key: torch.tensor(column, dtype=torch.float64)
            if is_rate(key, first[key])
            else _combined(f, column, seen)
            for key, column in columns.items()
        }
    if isinstance(first, list | tuple):
        return type(first)(_combined(f, each, seen) for each in zip(*values, strict=True))
    other = copy(first)
    for key, item in _combined(f, [vars(value) for value in values], seen).items():
        object.__setattr__(other, key, item)  # works for frozen dataclasses, too
    return other


def at_rows(value: Any, rows: slice | Tensor) -> Any:
    """Return a stack of only these rows of a stacked value.

    If `rows` is a slice, the tensors of the new stack are views.
    """
    return mapped(lambda t: t[rows], value)


def put_back(
    value: Any, row: int, into: Any, steps: int, moves: list[tuple[Tensor, Tensor]]
) -> None:
    """Update one of the original values from its row of the stack.

    Args:
        value: the stack.
        row: the row of the value in the stack.
        into: the original value.
        steps: how many steps were taken; an optimiser may count them.
        moves: this function appends pairs (tensor of `into`, tensor to be copied into it).
    """
    if isinstance(into, Tensor):
        moves.append((into, value[row]))
    elif isinstance(into, dict):
        for key, item in into.items():
            if not is_rate(key, item):
                put_back(value[key], row, item, steps, moves)
            elif key == COUNT:
                into[key] += steps
    elif isinstance(into, list | tuple):
        for stacked, own in zip(value, into, strict=True):
            put_back(stacked, row, own, steps, moves)
    elif not isinstance(into, PLAIN):
        put_back(vars(value), row, vars(into), steps, moves)


def put_rows(value: Any, rows: slice | Tensor, into: Any) -> None:
    """Copy a stack of these rows back into the rows of `into`, in place."""
    for t, to in zip(tensors(value), tensors(into), strict=True):
        to[rows] = t
