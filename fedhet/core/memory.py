"""The memory of callbacks for checkpoints, as JSON and tensors.

A value may be None, a bool, number or text; a list, tuple, set or dict of such values; a tensor or
a numpy array. The class attribute `memory` of a callback names the attributes to store.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhet.core.server.callbacks import Callback
from fedhet.core.trees import Tree

Node = Any  # a scalar, or a list that begins with the kind of the value
CONTAINERS = {"list": list, "tuple": tuple, "set": set}


class MemoryPacker:
    """Turns values into JSON, and collects their tensors in `tensors`, each under its own name.

    A tensor that occurs several times is stored once. Tensors are copied only if another view of
    the same memory is stored.
    """

    def __init__(self) -> None:
        self.tensors: Tree = {}
        self._names: dict[tuple[Any, ...], str] = {}
        self._memories: set[int] = set()  # addresses

    def memory(self, callback: Callback, path: str) -> dict[str, Node]:
        """Return the values of the callback's memory as JSON, by attribute.

        Raises:
            TypeError: a value cannot be stored; the message names the attribute.
        """
        return {n: self.value(getattr(callback, n), f"{path}.{n}") for n in callback.memory}

    def value(self, value: Any, path: str) -> Node:
        """Return the value as JSON."""
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else ["float", repr(value)]
        if isinstance(value, Tensor) and not value.is_meta:
            return self._tensor(value.detach(), path)
        if isinstance(value, np.ndarray | np.generic):
            array = torch.from_numpy(np.array(value))
            return ["scalar" if isinstance(value, np.generic) else "array", self._add(array, path)]
        if kind in CONTAINERS.values():
            return [kind.__name__, [self.value(one, f"{path}.{i}") for i, one in enumerate(value)]]
        if kind in (dict, OrderedDict) and all(type(key) in (int, str) for key in value):
            return ["dict", [[k, self.value(one, f"{path}.{k}")] for k, one in value.items()]]
        raise TypeError(
            f"{path} cannot be stored in a checkpoint: a {kind.__name__} is not among the values"
            " that a state may have (docs/extending.md, State)"
        )

    def _tensor(self, t: Tensor, path: str) -> Node:
        key = (t.data_ptr(), t.shape, t.stride(), t.dtype, t.device)
        name = self._names.get(key) if t.numel() else None
        if name is None:
            memory = t.untyped_storage().data_ptr()
            shared = memory in self._memories  # by another view; the file cannot store both
            self._memories.add(memory)
            name = self._names[key] = self._add(t.clone() if shared else t, path)
        return ["tensor", name, "cpu" if t.device.type == "cpu" else "device"]

    def _add(self, t: Tensor, path: str) -> str:
        while path in self.tensors:  # {"a.b": t, "a": {"b": t}}
            path += "'"
        self.tensors[path] = t
        return path


def put_back(
    callback: Callback, nodes: Mapping[str, Node], tensors: Tree, device: torch.device
) -> None:
    """Restore the attributes of the callback that `MemoryPacker.memory` has stored.

    Raises:
        ValueError: an attribute is not in the callback's `memory`.
    """
    if unknown := set(nodes) - set(callback.memory):
        raise ValueError(f"{callback.name} does not remember {', '.join(sorted(unknown))}")
    for name, node in nodes.items():
        setattr(callback, name, unpacked(node, tensors, device))


def unpacked(node: Node, tensors: Tree, device: torch.device) -> Any:
    """Return a value that `MemoryPacker.value` has stored.

    Tensors that were on the CPU stay there; all others are put on `device`.
    """
    if not isinstance(node, list):
        return node
    kind, content, *more = node
    if kind == "float":
        return float(content)
    if kind == "tensor":
        return tensors[content] if more == ["cpu"] else tensors[content].to(device)
    if kind == "array":
        return tensors[content].numpy()
    if kind == "scalar":
        return tensors[content].numpy()[()]
    if kind == "dict":
        return {key: unpacked(inner, tensors, device) for key, inner in content}
    return CONTAINERS[kind](unpacked(inner, tensors, device) for inner in content)
