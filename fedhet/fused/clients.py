"""The clients of one process, whose models are trained and evaluated as one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from fedhet.core.client import FedClient
from fedhet.core.descent import Descent
from fedhet.core.loop import Clock
from fedhet.core.messages import Broadcast, Reply
from fedhet.core.metrics import FORWARD_BATCH
from fedhet.core.state import Store
from fedhet.core.workspace import Workspace
from fedhet.engines.couriers import LocalCourier
from fedhet.fused.meeting import Meeting
from fedhet.fused.passes import Pass
from fedhet.fused.steps import Training

log = logging.getLogger("fedhet")


def obstacle(module: nn.Module | None) -> str | None:
    """Why models of this kind are trained one after another; None where they need not be."""
    if module is None:
        return None
    if next(module.buffers(), None) is not None:
        return "the model has buffers, which training may change (model.norm=group has none)"
    if any(isinstance(one, _DropoutNd) and one.p > 0 for one in module.modules()):
        return "dropout would draw other numbers"
    if any(isinstance(one, nn.RNNBase) for one in module.modules()):
        return "torch.func.vmap computes recurrent layers one model after another, or not at all"
    return None


class Fused:
    """Carries out the gradient steps and forward passes of several clients as one."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._said: set[str] = set()

    def descend(self, descent: Descent, orders: Sequence[Tensor]) -> Tensor:
        reason = obstacle(descent.module)
        if reason is None and any(len(order) for order in orders):
            return self._meeting.ask(Training(descent, list(orders)))  # type: ignore[no-any-return]
        if reason is not None and reason not in self._said:
            self._said.add(reason)
            log.info("engine.fused: one client after another, because %s", reason)
        return [descent.steps(order) for order in orders][-1]

    def forward(self, module: nn.Module, x: Tensor, part: str) -> Tensor:
        if any(isinstance(one, nn.RNNBase) for one in module.modules()):
            return torch.cat([getattr(module, part)(some) for some in x.split(FORWARD_BATCH)])
        return self._meeting.ask(Pass(module, x, part))  # type: ignore[no-any-return]


class FusedCourier(LocalCourier):
    """Serves k clients at a time, side by side.

    Args:
        make: makes the client of one message.
        store: where the clients that it makes keep their states.
        k: how many at a time.
        meeting: where they meet; None: one of their own.
    """

    def __init__(
        self,
        make: Callable[[], FedClient],
        store: Store,
        k: int,
        meeting: Meeting | None = None,
    ) -> None:
        super().__init__(make, store)
        self._k = k
        self._meeting = meeting or Meeting()
        self._fused = Fused(self._meeting)
        self._workspaces: list[Workspace] = []  # one for each place

    def exchange(self, plan: list[Broadcast], clock: Clock) -> Iterator[Reply]:
        for first in range(0, len(plan), self._k):
            some = plan[first : first + self._k]
            with clock("clients"):
                works = [partial(self._serve, place, msg) for place, msg in enumerate(some)]
                replies = self._meeting.gather(works)
            yield from replies

    def _serve(self, place: int, msg: Broadcast) -> Reply:
        client = self._make()
        if place == len(self._workspaces):
            self._workspaces.append(client.workspace.twin(self._fused))
        client.workspace = self._workspaces[place]
        return client.handle(replace(msg, deadline=None))
