"""Traces frequent steps: records their operations once, and then repeats these operations.

This saves the overhead of autograd and vmap, and changes no result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

Function = Callable[..., Any]
PAID = 10  # tracing takes as long as it saves in so many steps of a small network
ATEN = torch.ops.aten
VIEWS = ATEN.detach.default, ATEN.view.default, ATEN._unsafe_view.default, ATEN.expand.default
FORMS = 64  # traces are kept for so many forms of steps


class Traces:
    """Traces of steps of one form, by shape.

    Attributes:
        checked: whether a check has shown that the form's hooks read only their arguments.
    """

    def __init__(self) -> None:
        self.checked = False
        self._uses: Counter[Hashable] = Counter()
        self._traced: dict[Hashable, Function | None] = {}

    def results(self, f: Function, given: tuple[Tensor, ...], shape: Hashable) -> Any:
        """Return f(*given).

        Args:
            f: a pure function of tensors, the same for all steps of this form and shape.
            given: the arguments of f.
            shape: a key for the arguments' shapes.
        """
        if traced := self._traced.get(shape):
            return traced(*given)
        if shape not in self._traced:
            self._uses[shape] += 1
            if self._uses[shape] > PAID:
                self._traced[shape], found = trace(f, given)
                return found
        return f(*given)


# The cache is limited: if a number in a message changes every round, each round has its own form.
@lru_cache(maxsize=FORMS)
def traces_of(kind: Hashable) -> Traces:
    """Return the traces of this form of training in this process."""
    return Traces()


class _Recorder(TorchDispatchMode):
    """Records in a graph what torch computes, below autograd and vmap.

    Attributes:
        graph: the operations.
        complete: whether they depend on nothing but the arguments.
    """

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.graph = Graph()
        self.complete = True
        self._known: dict[int, tuple[Tensor, Node | None]] = {}  # the tensors live: ids are unique
        for i, t in enumerate(given):
            self._note(t, self.graph.placeholder(f"given_{i}"))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes longer than a run

    def _note(self, t: Tensor, node: Node | None) -> None:
        self._known[id(t)] = t, node

    def node(self, t: Tensor) -> Node | None:
        """Return the node that computes the tensor."""
        self.complete &= id(t) in self._known
        return self._known[id(t)][1] if self.complete else None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func in VIEWS and (found.shape, found.stride()) == (args[0].shape, args[0].stride()):
            node = self.node(args[0])  # the operation does nothing, so leave it out
        else:
            node = self.graph.call_function(func, *tree_map_only(Tensor, self.node, (args, kwargs)))
        if isinstance(found, Tensor):
            self._note(found, node)
        elif isinstance(found, tuple | list):  # None for a gradient that is not asked for
            for i, t in enumerate(found):
                if isinstance(t, Tensor):
                    self._note(t, self.graph.call_function(getitem, (node, i)))
        else:  # a number that was read from a tensor, for example
            self.complete = False
        return found


def trace(f: Function, given: tuple[Tensor, ...]) -> tuple[Function | None, Any]:
    """Return the operations of f as a function, None if f reads further tensors; and f(*given)."""
    with _Recorder(given) as recorder:
        found = f(*given)
    recorder.graph.output(tree_map_only(Tensor, recorder.node, found))
    if not recorder.complete:
        return None, found
    recorder.graph.eliminate_dead_code()
    module = GraphModule(torch.nn.Module(), recorder.graph)
    return torch.no_grad()(module.forward), found
