"""Pooled training: one model, trained on the training data of all clients together.

No federation can train like this. In simulations it is the reference that a federation on the same
data aims at:

    server: x <- x - lr g(x) over E epochs of mini-batches of the union of all clients' data

    down:          x
    up:            x after training
    client keeps:  nothing
    server keeps:  x

In each round one client of the simulation reads the data of all clients and trains on them. The
recorded bytes are the bytes of the model, to this client and back. With `fraction=1` the method
computes as much as FedAvg: rounds times E epochs over the same samples, but in steps one after
another. It takes all samples also if `fraction` is below 1. With a single client it is FedAvg, bit
for bit.

With `only=k` the method trains on the data of client k alone. Its model is evaluated like every
global model, and so shows what the model of one site is worth at the other sites.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fedhet.core.authors import (
    Client,
    ClientContext,
    ConfigError,
    Message,
    Method,
    Phase,
    Result,
    RunSetup,
    Samples,
    State,
    log,
    serves,
    setting,
)

POOLS = "pools the clients' raw data"


class PooledClient(Client):
    """Trains on the data of all clients, or of one client."""

    @serves
    def train(self, msg: Message, state: State, ctx: ClientContext) -> tuple[Result, State]:
        task, only = ctx.workspace.task, self.options.only
        pids = range(len(task.sizes)) if only is None else [only]
        parts = [task.clients[pid].train for pid in pids if task.sizes[pid]]
        x, y = (torch.cat([getattr(part, name) for part in parts]) for name in ("x", "y"))
        data = ctx.workspace.prepared(Samples(x, y))
        return Result(ctx.fit(msg.weights, data=data).params), state


@dataclass(frozen=True, kw_only=True)
class Pooled(Method):
    """Sends the model to one client in each round."""

    name = "pooled"
    client = PooledClient
    breaks = {"used weights": "there is one update", "noise": POOLS}

    only: int | None = setting(None, low=0)

    def setup(self, setup: RunSetup) -> State:
        task = setup.workspace.task
        for plugin in setup.plugins:
            raise ConfigError(
                f"method=pooled refuses plugin {plugin.name!r}: it acts on a client's own data and"
                " model, and this method has none"
            )
        if not setup.workspace.simulated or task.example is not None:
            raise ConfigError(
                f"method=pooled {POOLS}, which never leave a site: use it in simulations only, with"
                " engine=local or engine=ray, and with a dataset other than local"
            )
        if self.only is not None and not sum(task.sizes[self.only : self.only + 1]):
            raise ConfigError(
                f"method.only={self.only}: it must be the number of one of the"
                f" {len(task.sizes)} clients, counted from 0, that has training samples"
            )
        log.warning("method=pooled %s; it is a reference, not federated learning", POOLS)
        return {}

    def phases(self, setup: RunSetup) -> list[Phase]:
        return [replace(phase, cohort=1) for phase in super().phases(setup)]
