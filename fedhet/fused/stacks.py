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
RATES, COUNT = ("lr", "factor"), "t"  # of optimisers: they may differ; one of them changes
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


def stack(values: Sequence[Any], seen: dict[Hashable, Tensor]) -> Any:
    """Stack values of one form. Rates become a tensor (K,), float64, also where they are equal.

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
    if isinstance(first, PLAIN):
        return first
    if isinstance(first, dict):
        each = {key: [one[key] for one in values] for key in first}
        return {
            key: torch.tensor(some, dtype=torch.float64)
            if is_rate(key, first[key])
            else stack(some, seen)
            for key, some in each.items()
        }
    if isinstance(first, list | tuple):
        return type(first)(stack(each, seen) for each in zip(*values, strict=True))
    return _changed(first, stack([vars(one) for one in values], seen))


def mapped(f: Callable[[Tensor], Tensor], value: Any, seen: dict[int, Tensor] | None = None) -> Any:
    """The value with f(t) in the place of every tensor t."""
    seen = {} if seen is None else seen
    if isinstance(value, Tensor):
        if id(value) not in seen:
            seen[id(value)] = f(value)
        return seen[id(value)]
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, dict):
        return {key: mapped(f, one, seen) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(mapped(f, one, seen) for one in value)
    return _changed(value, mapped(f, vars(value), seen))


def at_rows(value: Any, rows: slice | Tensor) -> Any:
    """Some of the values that were stacked, as a stack of their own; a slice is a view."""
    return mapped(lambda t: t[rows], value)


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

    def one_of_them(t: Tensor, to: Any) -> Any:
        if isinstance(to, Tensor):
            moves.append((to, t[row]))
            return to
        return type(to)(t[row]) if isinstance(to, int | float) else t[row].clone()

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
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, dict):
        given = into or dict.fromkeys(value)
        return {
            key: given[key] if key in RATES else _put(one, given[key], leaf)
            for key, one in value.items()
        }
    if isinstance(value, list | tuple):
        given = into or [None] * len(value)
        return type(value)(_put(one, to, leaf) for one, to in zip(value, given, strict=True))
    for key, one in _put(vars(value), vars(into), leaf).items():
        object.__setattr__(into, key, one)
    return into


def _changed(value: Any, attributes: dict[str, Any]) -> Any:
    other = copy(value)
    for key, one in attributes.items():
        object.__setattr__(other, key, one)  # also of frozen dataclasses
    return other
