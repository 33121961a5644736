"""SGDM: momentum SGD on the clients, whose momenta are averaged too (Liu et al. 2020).

The paper is "Accelerating federated learning via momentum gradient descent".

    client: d <- gamma d + g(w)                                            (eq. 4)
            w <- w - lr d, from w = x and the received d                   (eq. 5)
    server: x <- sum_k p_k w_k,  p_k = n_k / sum_j n_j
            d <- sum_k p_k d_k

    down:          x, `sgdm.d`
    up:            w_k, n_k, `sgdm.d` (d_k)
    client keeps:  nothing
    server keeps:  x, d (0 at first)

This is the heavy ball method without dampening. A client starts from the d that the server has at
the time, whether or not it took part in forming it; with one client the method is the centralised
heavy ball. Both means use the same weights: n_k, or what a plug-in such as FedNorm makes of them.
Weight decay is added to g. client.momentum must be 0, because gamma is the momentum, and the
client's optimiser must be SGD.

Options: `momentum_state=reset` starts every client from d = 0 and sends no d, which is FedAvg with
client.momentum=gamma; the default is `averaged`.

Default: gamma = 0.9, which is not from the paper, nor from those that compare with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from fedhet.core import check, optimizers, trees
from fedhet.core.client import FedClient
from fedhet.core.errors import ConfigError
from fedhet.core.messages import Broadcast, Extras, Update
from fedhet.core.phases import Phase
from fedhet.core.setting import Setting
from fedhet.core.strategy import FedStrategy
from fedhet.core.trees import Prepared, Tree

MOMENTUM = "sgdm.d"


class SGDMClient(FedClient):
    """Trains by SGD with momentum gamma from the received d.

    Where the server sends no d (reset, or a phase of a plug-in), the momentum starts at 0.
    """

    def train(self, msg: Broadcast) -> Update:
        self.model = self.workspace.load(self.start(msg))
        d = self.prepare(msg)  # which the optimiser changes in place
        self.train_model(self.model, self.data, d)
        return self.reply({MOMENTUM: d} if d else None)

    def prepare(self, msg: Broadcast) -> Tree:
        if MOMENTUM not in msg.extras:
            return {}
        # A copy, because other clients receive the original.
        return trees.map(torch.clone, trees.pick(msg.tree(MOMENTUM), self.workspace.trained))

    def optimizer(self, params: dict[str, nn.Parameter], own: Prepared) -> optimizers.Optimizer:
        return optimizers.SGD(list(params.values()), self.local, list(own.values()) or None)


class SGDM(FedStrategy):
    """Averages the clients' weights and their momenta."""

    name = "sgdm"
    client_cls = SGDMClient
    only_means = True
    enters = "momenta"
    otherwise = {"only_weights": "method.momentum_state=reset"}
    memory = ("_d",)

    def __init__(
        self, setting: Setting, *, gamma: float = 0.9, momentum_state: str = "averaged"
    ) -> None:
        self.gamma = check.number("method.gamma", gamma, low=0, open_high=1)
        states = ("averaged", "reset")
        self.momentum_state = check.one_of("method.momentum_state", momentum_state, states)
        local = setting.local
        if local.optimizer != "sgd" or local.momentum:
            raise ConfigError(
                f"client.optimizer={local.optimizer}, client.momentum={local.momentum}: method=sgdm"
                " is SGD with its own momentum; use client=sgd, client.momentum=0 and method.gamma"
            )
        self.releases = int(momentum_state == "averaged")
        self.only_weights = momentum_state == "reset"
        super().__init__(replace(setting, local=replace(local, momentum=self.gamma)))

    def setup(self) -> None:
        self._like = trees.pick(self.workspace.initial, self.workspace.trained)
        self._d = trees.zeros(self._like)

    def cohort_extras(self, phase: Phase, step: int, cohort: list[int]) -> Extras:
        if self.momentum_state == "reset":
            return {}
        return {MOMENTUM: trees.cast(self._d, self._like)}

    def check(self, update: Update) -> None:
        if self.momentum_state == "averaged":
            update.tree(MOMENTUM, self._like)

    def merge(self, updates: Iterator[Update], old: Tree) -> Tree:
        change = self.setting.merge.average()
        d = self.setting.merge.average()
        for update in updates:
            change.add(update.change, update.weight)
            if self.momentum_state == "averaged":
                d.add(update.tree(MOMENTUM), update.weight)
        if self.momentum_state == "averaged":
            self._d = d.mean(reuse=True)
        return trees.add(change.mean(reuse=True), old)
