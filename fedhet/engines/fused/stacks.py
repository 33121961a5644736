"""Several values of one form as one: each of their tensors has one of them in every row.

Values are trees of any depth, of tensors, numbers and texts in dicts, lists, tuples and objects.
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
RATES, COUNT = ("lr", "factor"), "t"  # of optimisers: numbers that may differ; one counts steps
_OF_ALL = vars(nn.Module()).keys()  # attributes that torch gives every module
_LAYERS: WeakKeyDictionary[nn.Module, Hashable] = WeakKeyDictionary()


def form(value: Any) -> Hashable:
    """What values must have in common to be stacked: all but the entries of tensors, and rates."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.device
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, dict):
        return tuple((k, None if is_rate(k, one) else form(one)) for k, one in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(form, value))
    return type(value), form(vars(value))


def is_rate(key: object, value: object) -> bool:
    """Whether an attribute of an optimiser is a number that may differ."""
    return (key in RATES or key == COUNT) and isinstance(value, int | float)


def layers(module: nn.Module) -> Hashable:
    """What modules must have in common so that one of them may compute for all."""
    known = _LAYERS.get(module)
    if known is None:
        state = module.state_dict()
        tensors = [(name, t.shape, t.dtype) for name, t in state.items()]
        # A class may be defined anew in this process, and a layer's text may leave out a number.
        classes = tuple(map(type, module.modules()))
        attributes = [
            (key, _compared(value))
            for layer in module.modules()
            for key, value in vars(layer).items()
            if key not in _OF_ALL
        ]
        # Nobody shares what is not among the tensors that are stacked.
        apart = [id(t) for name, t in module.named_buffers() if name not in state]
        known = repr(module), classes, tuple(attributes), tuple(tensors), tuple(apart)
        _LAYERS[module] = known
    return known


def _compared(value: Any) -> Hashable:
    """An attribute of a layer as a key: itself, the text of what is plain, or its identity."""
    if isinstance(value, (dict, list, set, tuple, *PLAIN)):
        return repr(value)
    return value if isinstance(value, FunctionType | BuiltinFunctionType | type) else id(value)


def stack(values: Sequence[Any]) -> Any:
    """Stack values of one form. Rates become a tensor (K,), float64, also where they are equal.

    Args:
        values: K of them.
    """
    return _combined(lambda each: torch.stack([t.detach() for t in each]), values, {})


def mapped(f: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The value with f(t) in the place of every tensor t."""
    return _combined(lambda each: f(*each), [value], {})


def tensors(value: Any) -> list[Tensor]:
    """All tensors of the value, each of them once."""
    found: dict[Hashable, Tensor] = {}
    _combined(lambda each: each[0], [value], found)
    return list(found.values())


def _combined(
    f: Callable[[Sequence[Tensor]], Tensor], values: Sequence[Any], seen: dict[Hashable, Tensor]
) -> Any:
    """A value of the form of these, with f(their tensors) in the place of each tensor.

    Args:
        f: what is put there.
        values: they have one form.
        seen: what has been put there, so that a tensor of several names stays one.
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
        columns = {key: [one[key] for one in values] for key in first}
        return {
            key: torch.tensor(column, dtype=torch.float64)
            if is_rate(key, first[key])
            else _combined(f, column, seen)
            for key, column in columns.items()
        }
    if isinstance(first, list | tuple):
        return type(first)(_combined(f, each, seen) for each in zip(*values, strict=True))
    other = copy(first)
    for key, one in _combined(f, [vars(value) for value in values], seen).items():
        object.__setattr__(other, key, one)  # also of frozen dataclasses
    return other


def at_rows(value: Any, rows: slice | Tensor) -> Any:
    """Some of the values that were stacked, as a stack of their own; a slice is a view."""
    return mapped(lambda t: t[rows], value)


def put_back(
    value: Any, row: int, into: Any, steps: int, moves: list[tuple[Tensor, Tensor]]
) -> None:
    """Give one of the values that were stacked what its row of `value` has become.

    Args:
        value: the stack.
        row: which of its rows.
        into: the value.
        steps: how many steps were taken, which an optimiser may count.
        moves: gets the tensors of the value, each with what is to be copied into it.
    """
    if isinstance(into, Tensor):
        moves.append((into, value[row]))
    elif isinstance(into, dict):
        for key, one in into.items():
            if not is_rate(key, one):
                put_back(value[key], row, one, steps, moves)
            elif key == COUNT:
                into[key] += steps
    elif isinstance(into, list | tuple):
        for one, own in zip(value, into, strict=True):
            put_back(one, row, own, steps, moves)
    elif not isinstance(into, PLAIN):
        put_back(vars(value), row, vars(into), steps, moves)


def put_rows(value: Any, rows: slice | Tensor, into: Any) -> None:
    """Give these rows of `into`, in place, what they have become in a stack of their own."""
    for t, to in zip(tensors(value), tensors(into), strict=True):
        to[rows] = t
