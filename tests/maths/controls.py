"""What SCAFFOLD's server gets: a step, and clients that replace their control variates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor

from fedhet.core.kernel import Update


def step_of(x: Tensor, clients: int) -> Any:
    """As much of a step as it reads, of a model with the tensor "x" alone."""
    task = SimpleNamespace(sizes=[1] * clients)
    return SimpleNamespace(workspace=SimpleNamespace(initial={"x": x}, task=task))


def replaced(pid: int, c_i: Tensor, c_plus: Tensor, change: Tensor, weight: float = 1.0) -> Update:
    """A client that has put `c_plus` in the place of `c_i`, and has moved x by `change`."""
    sent: Any = None
    extras = {"c_plus": {"x": c_plus}, "c_i": {"x": c_i}}
    return Update(pid, 1, weight, {}, {"x": change}, extras, {}, sent)
