"""Finds what a class does not name in its `memory`, although a later step reads it.

An attribute that a step leaves behind and that is not in `memory` may be of use in that step only;
then the next step assigns it before it reads it. So such attributes are deleted from the objects of
a run that goes on, and a step that does read one fails.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fedhet.core import trees
from fedhet.core.memory import MemoryPacker, remembered
from fedhet.core.plugin import Plugin
from fedhet.core.server_opt import ServerOptimizer
from fedhet.core.strategy import FedStrategy

DEPTH = 3  # of objects in attributes of objects
# What fedhet itself assigns in each step, and what never changes.
OWN = {"current", "local", "recorded", "timetable", "kept_back"}
OWN |= {"workspace", "setting", "sizes", "rounds", "plugins", "settings", "server", "nodes"}
OWN |= {"_awaited"}
KINDS = (FedStrategy, Plugin, ServerOptimizer)

Traces = dict[str, dict[str, str]]  # object -> attribute -> its value, in short


def traces(parts: Mapping[str, object]) -> Traces:
    """The attributes of a run's objects that are not in their `memory`, and what they hold."""
    return {
        path: {name: _short(value, DEPTH) for name, value in _others(obj).items()}
        for path, obj in _objects(parts)
    }


def forget(parts: Mapping[str, object], before: Traces) -> None:
    """Delete the attributes that do not hold what they held `before`, in the run that was killed.

    Args:
        parts: the objects of the run that goes on, by name.
        before: the traces of the other run's objects after the same step.
    """
    for path, obj in list(_objects(parts)):
        for name, value in list(_others(obj).items()):
            held = before.get(path, {}).get(name)
            if held is not None and held != _short(value, DEPTH):
                delattr(obj, name)


def _objects(parts: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """The objects, and those with a `memory` in their attributes."""
    for path, obj in parts.items():
        if isinstance(obj, KINDS):
            yield path, obj
            inner = {name: getattr(obj, name, None) for name in remembered(obj)}
            yield from ((f"{path}.{n}", one) for n, one in inner.items() if remembered(one))


def _others(obj: object) -> dict[str, Any]:
    named = OWN.union(remembered(obj))
    return {name: value for name, value in vars(obj).items() if name not in named}


def _short(value: Any, depth: int) -> str:
    """A text that differs where values do, but for what is recorded; "?" where that is unknown."""
    if isinstance(value, nn.Module | torch.optim.Optimizer):
        value = value.state_dict()
    try:
        packer = MemoryPacker()
        node = packer.value(value, "")
        return json.dumps(node) + trees.sha256({"": packer.tensors})
    except TypeError:
        if not depth or not hasattr(value, "__dict__"):
            return "?"
        inner = {name: one for name, one in vars(value).items() if name != "recorded"}
        return str({name: _short(one, depth - 1) for name, one in inner.items()})
