"""Traces frequent steps: records their operations once, and then repeats these operations.

This saves the overhead of autograd and vmap, and changes no result.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]
IMPORTED = "torch._dynamo"  # the first trace of a process imports it
# The number of steps of one shape after which tracing pays off. Tracing takes the time that it
# saves in 200 steps of a small network. Its import takes the time that it saves in 4,000 steps.
PAID, IMPORT_PAID = 200, 4000
FORMS = 64  # the number of forms of steps for which traces are kept


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
            if self._uses[shape] > (PAID if IMPORTED in sys.modules else IMPORT_PAID):
                self._traced[shape] = trace(f, given)
        return f(*given)


# The cache is limited: if a number in a message changes every round, each round has its own form.
@lru_cache(maxsize=FORMS)
def traces_of(kind: Hashable) -> Traces:
    """Return the traces of this form of training in this process."""
    return Traces()


def get_ready() -> None:
    """Import now what the first trace needs.

    Do nothing on machines with CUDA, because the first trace might start CUDA.
    """
    if not torch.cuda.is_available():
        trace(torch.neg, (torch.zeros(1),))


def trace(f: Function, given: tuple[Tensor, ...]) -> Function | None:
    """Return the operations of f as a function; None if f reads further tensors."""
    from torch.fx.experimental.proxy_tensor import make_fx

    found = make_fx(f)(*given)
    if any(node.op == "get_attr" for node in found.graph.nodes):
        return None
    found.graph.eliminate_dead_code()
    found.recompile()
    return torch.no_grad()(found.forward)
