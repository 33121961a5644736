"""Serves the clients of one process with fused training and evaluation of their models."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from fedhet.core.client.client import FedClient
from fedhet.core.client.descent import Descent, descend
from fedhet.core.client.state import Store
from fedhet.core.errors import log
from fedhet.core.messages import Broadcast, Reply
from fedhet.core.metrics import assess
from fedhet.core.server.loop import Clock
from fedhet.core.targets import Scores, Tally
from fedhet.core.task import Samples, Task
from fedhet.core.workspace import Workspace
from fedhet.engines.fused.passes import RECURRENT, Assessment, Pass
from fedhet.engines.fused.scheduler import Scheduler
from fedhet.engines.fused.steps import Impure, Training
from fedhet.engines.local_transport import LocalTransport


def obstacle(module: nn.Module | None) -> str | None:
    """Return why models of this kind are trained one after another; None if fusing is possible."""
    if module is None:
        return None
    if next(module.buffers(), None) is not None:
        return "the model has buffers, which training may change (model.norm=group has none)"
    for layer in module.modules():
        if isinstance(layer, nn.RNNBase):
            return RECURRENT
        if isinstance(layer, _DropoutNd) and layer.p > 0 and layer.training:
            return f"{type(layer).__name__} draws numbers for each client by itself"
    return None


# Whether a fused request of the present client has failed, perhaps because of other clients.
ALONE: ContextVar[bool] = ContextVar("alone", default=False)


class OneByOne(BaseException):
    """Raised while a client is served: serve the client again, and train it without others.

    It is not an Exception, so that the client does not turn it into a failed reply.
    """


class Fused:
    """Computes the gradient steps and forward passes of several clients in one batch (fused).

    Args:
        scheduler: lets the clients wait for each other.
        gains: whether to leave out trainings that hardly gain, as scripts/bench has measured: with
            a single step, or with batches that must not be padded.
    """

    def __init__(self, scheduler: Scheduler, *, gains: bool = False) -> None:
        self._scheduler = scheduler
        self._gains = gains
        self._refused: dict[Hashable, str] = {}  # kind of training or form of pass -> the reason

    def descend(self, descent: Descent, orders: Sequence[Tensor]) -> Tensor:
        training = Training(descent, list(orders), alone=ALONE.get())
        kind = training.kind
        if reason := obstacle(descent.module):
            self._refuse(kind, reason)
        hardly = self._gains and (descent.exact or len(training.lengths) == 1)
        if hardly or kind in self._refused or not training.lengths:
            return descend(descent, orders, None)
        try:
            return self._scheduler.ask(training)  # type: ignore[no-any-return]
        except Exception as error:
            if ALONE.get() or isinstance(error, Impure):
                self._refuse(kind, str(error).strip().partition("\n")[0])
            ALONE.set(True)
            raise OneByOne from error

    def _refuse(self, form: Hashable, reason: str) -> None:
        if reason not in self._refused.values():
            log.warning("engine.fused: one client after another, because %s", reason)
        self._refused[form] = reason

    def forward(self, module: nn.Module, x: Tensor, part: str) -> Tensor:
        request = Pass(module, x, part)
        found = self._asked(request)
        return request.alone() if found is None else found

    def assess(
        self, model: nn.Module, parts: Sequence[Samples], task: Task
    ) -> list[tuple[Scores, Tally]]:
        found = self._asked(Assessment(model, parts, task)) if parts else []
        return assess(model, parts, task) if found is None else found

    def _asked(self, request: Pass | Assessment) -> Any:
        """Return the result of the request; None if the client computes it without others."""
        if request.form in self._refused:
            return None
        try:
            return self._scheduler.ask(request)
        except Exception as error:  # noqa: BLE001 -- if vmap is not the cause, it comes again
            self._refuse(request.form, str(error).strip().partition("\n")[0])


class FusedTransport(LocalTransport):
    """Serves k clients at a time, side by side.

    Args:
        make: returns a client for one message.
        store: the store of the clients' states.
        k: the number of clients at a time.
        gains: as for `Fused`.

    Attributes:
        batcher: computes the clients' fused work.
    """

    def __init__(
        self, make: Callable[[], FedClient], store: Store, k: int, *, gains: bool = False
    ) -> None:
        super().__init__(make, store)
        self._k = k
        self._scheduler = Scheduler.here()  # shared with other runs of this thread
        self.batcher = Fused(self._scheduler, gains=gains)
        self._workspaces: list[Workspace] = []  # one for each of the k places

    def exchange(self, plan: list[Broadcast], clock: Clock) -> Iterator[Reply]:
        for first in range(0, len(plan), self._k):
            group = plan[first : first + self._k]
            with clock("clients"):
                works = [partial(self._serve, place, msg) for place, msg in enumerate(group)]
                replies = self._scheduler.gather(works)
            yield from replies

    def _serve(self, place: int, msg: Broadcast) -> Reply:
        client = self._make()
        if place == len(self._workspaces):
            self._workspaces.append(client.workspace.clone(self.batcher))
        client.workspace = self._workspaces[place]
        try:
            return client.handle(msg if msg.deadline is None else replace(msg, deadline=None))
        except OneByOne:
            return self._serve(place, msg)
