"""SGDM: momentum federated learning (Liu et al. 2020, "Accelerating federated learning via momentum
gradient descent").

    client: d <- gamma d + g;  w <- w - lr d      server: x = sum_k p_k w_k;  d = sum_k p_k d_k

    down: x, `sgdm.d`      up: w_k, n_k, `sgdm.d`      client keeps: nothing      server keeps: x, d (0 at first)

Heavy ball without dampening, on the clients; whoever takes part later starts from the d that the
server then holds. With one client it is centralised heavy ball. p_k are the weights as they stand
(FedNorm's, say), on both averages. Weight decay is added to g. `momentum_state=reset` starts every
client from d = 0 and sends none: FedAvg with client.momentum. client.momentum must be 0, since
gamma is that momentum, and the client's optimiser SGD. gamma .9 is not from the papers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from fedhet import check, optimizers, trees
from fedhet.client import FedClient
from fedhet.errors import ConfigError
from fedhet.messages import Broadcast, Extras, Update
from fedhet.phases import Phase
from fedhet.setting import Setting
from fedhet.strategy import FedStrategy
from fedhet.trees import Tree

MOMENTUM = "sgdm.d"


class SGDMClient(FedClient):
    """SGD with momentum local.momentum = gamma, from the d that is sent, else (a plug-in's phase,
    reset) from 0."""

    _d: Tree | None = None

    def train(self, msg: Broadcast) -> Update:
        d = msg.extras.get(MOMENTUM)
        self._d = (
            {name: d[name].to(self.site.device, copy=True) for name in self.site.trained}
            if isinstance(d, dict)
            else None
        )
        update = super().train(msg)
        if self._d is not None:
            update.extras[MOMENTUM] = self._d
        return update

    def optimizer(self, params: list[nn.Parameter]) -> optimizers.Optimizer:
        return optimizers.SGD(
            params, self.local, None if self._d is None else list(self._d.values())
        )


class SGDM(FedStrategy):
    """FedAvg of weights and momenta."""

    name = "sgdm"
    client_cls = SGDMClient

    def __init__(
        self, setting: Setting, *, gamma: float = 0.9, momentum_state: str = "averaged"
    ) -> None:
        self.gamma = check.number("method.gamma", gamma, low=0, open_high=1)
        self.momentum_state = check.one_of(
            "method.momentum_state", momentum_state, ("averaged", "reset")
        )
        local = setting.local
        if local.optimizer != "sgd" or local.momentum:
            raise ConfigError(
                f"client.optimizer={local.optimizer}, client.momentum={local.momentum}: method=sgdm"
                " is SGD with its own momentum; use client=sgd, client.momentum=0 and method.gamma"
            )
        super().__init__(replace(setting, local=replace(local, momentum=self.gamma)))
        self._like = trees.pick(self.site.initial, self.site.trained)
        self._d = trees.zeros(self._like)

    def cohort_extras(self, phase: Phase, step: int, cohort: list[int]) -> Extras:
        return (
            {MOMENTUM: trees.cast(self._d, self._like)} if self.momentum_state == "averaged" else {}
        )

    def check(self, update: Update) -> None:
        if self.momentum_state == "averaged":
            update.tree(MOMENTUM, self._like)

    def merge(self, updates: Iterator[Update], old: Tree) -> Tree:
        change, d = trees.Sum(), trees.Sum()
        for update in updates:
            change.add(update.change, update.weight)
            if self.momentum_state == "averaged":
                d.add(update.tree(MOMENTUM, self._like), update.weight)
        if d.tree:
            self._d = d.mean(reuse=True)
        return trees.add(change.mean(reuse=True), old)
