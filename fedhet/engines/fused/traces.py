"""Steps that are taken often are traced: their operations are recorded once, then repeated.

That saves what autograd and vmap do beside these operations, and changes no result.
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
IMPORTED = "torch._dynamo"  # by the first trace of a process
# Steps of one shape until tracing has paid: it takes as long as it saves in 200 steps of a small
# network, and its import as long as in 4,000.
PAID, IMPORT_PAID = 200, 4000
FORMS = 64  # of which traces are kept


class Traces:
    """Of steps of one form, by shape.

    Attributes:
        checked: whether the hooks of this form read what they are given, and no more.
    """

    def __init__(self) -> None:
        self.checked = False
        self._uses: Counter[Hashable] = Counter()
        self._traced: dict[Hashable, Function | None] = {}

    def results(self, f: Function, given: tuple[Tensor, ...], shape: Hashable) -> Any:
        """Return f(*given).

        Args:
            f: a pure function of tensors, the same for all steps of this form and shape.
            given: its arguments.
            shape: of the arguments.
        """
        if traced := self._traced.get(shape):
            return traced(*given)
        if shape not in self._traced:
            self._uses[shape] += 1
            if self._uses[shape] > (PAID if IMPORTED in sys.modules else IMPORT_PAID):
                self._traced[shape] = trace(f, given)
        return f(*given)


# A number in a message that changes from round to round makes a form of each round.
@lru_cache(maxsize=FORMS)
def traces_of(kind: Hashable) -> Traces:
    """The traces of a form of trainings in this process."""
    return Traces()


def get_ready() -> None:
    """Import what a first trace imports, on machines without CUDA, which that might start."""
    if not torch.cuda.is_available():
        trace(torch.neg, (torch.zeros(1),))


def trace(f: Function, given: tuple[Tensor, ...]) -> Function | None:
    """The operations of f as a function of its arguments; None where it reads other tensors."""
    from torch.fx.experimental.proxy_tensor import make_fx

    found = make_fx(f)(*given)
    if any(node.op == "get_attr" for node in found.graph.nodes):
        return None
    found.graph.eliminate_dead_code()
    found.recompile()
    return torch.no_grad()(found.forward)
