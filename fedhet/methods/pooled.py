"""Pooled training: one model, trained on the training data of all clients together.

No federation can do that. It is the reference that a federation of the same data aims at, in
simulations only:

    server: x <- x - lr g(x) over E epochs of mini-batches of the union of all clients' data

    down:          x, `pooled.only` where it is set
    up:            x after training
    client keeps:  nothing
    server keeps:  x

A step is carried out by one client of a simulation, which reads the data of all; the bytes that are
recorded are those of the model on its way there and back. With `fraction=1` it has the compute of
FedAvg: rounds times E epochs over the same samples, but in steps one after another. It takes all
samples also where `fraction` is less. With a single client it is FedAvg, bit for bit.

With `only=k`, the data are those of client k alone: what a model of one site is worth elsewhere,
since it is scored as every global model.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from fedhet.core import check
from fedhet.core.client import FedClient
from fedhet.core.errors import ConfigError
from fedhet.core.messages import Broadcast, Extras, Update
from fedhet.core.phases import Phase
from fedhet.core.setting import Setting
from fedhet.core.strategy import FedStrategy
from fedhet.core.task import Samples

log = logging.getLogger("fedhet")
ONLY = "pooled.only"
POOLS = "pools the clients' raw data"


class PooledClient(FedClient):
    """Trains on the data of all clients, or of one."""

    def train(self, msg: Broadcast) -> Update:
        task = self.workspace.task
        only = {msg.integer(ONLY)} if ONLY in msg.extras else range(len(task.sizes))
        parts = [task.clients[pid].train for pid in only if task.sizes[pid]]
        x, y = (torch.cat([getattr(part, name) for part in parts]) for name in ("x", "y"))
        self.data = self.workspace.prepared(Samples(x, y))
        return super().train(msg)


class Pooled(FedStrategy):
    """Sends the model to one client in each step."""

    name = "pooled"
    client_cls = PooledClient
    weighted = False
    refuses_noise = POOLS

    def __init__(self, setting: Setting, *, only: int | None = None) -> None:
        self.only = check.optional(check.integer, "method.only", only, low=0)
        super().__init__(setting)

    def cohort_extras(self, phase: Phase, step: int, cohort: list[int]) -> Extras:
        return {} if self.only is None else {ONLY: self.only}

    def setup(self) -> None:
        task = self.workspace.task
        if not self.workspace.simulated or task.example is not None:
            raise ConfigError(
                f"method=pooled {POOLS}, which never leave a site: it is for simulations, with"
                " engine=local or engine=ray and another dataset than local"
            )
        if self.only is not None and not sum(task.sizes[self.only : self.only + 1]):
            raise ConfigError(
                f"method.only={self.only}: it must be the number of one of the"
                f" {len(task.sizes)} clients, counted from 0, that has training samples"
            )
        log.warning("method=pooled %s; it is a reference, not federated learning", POOLS)

    @property
    def refuses(self) -> dict[str, str]:
        alone = "it acts on a client's own data and model, and this method has none"
        return {plugin.name: alone for plugin in self.plugins}

    def phases(self) -> list[Phase]:
        return [replace(phase, cohort=1) for phase in super().phases()]
