"""FedNova (Wang et al. 2020, "Tackling the objective inconsistency problem in heterogeneous
federated optimization").

    d_i = (x - w_i) / |a_i|_1      tau_eff = sum_i p_i |a_i|_1      x <- x - tau_eff sum_i p_i d_i

    down: x      up: w_i, n_i, `fednova.steps`      client keeps: nothing      server keeps: x

|a_i|_1 is the number of steps for plain SGD, and has closed forms for momentum (which starts at 0
in each round) and for the proximal term of plugin=[fedprox]; both together, and Adam, have none and
are refused. The paper's client sends d_i and |a_i|_1; here it sends w_i and its steps, from which
the server, which set the rate, the momentum and mu, forms both. p_i are the weights as they stand:
n_i, or what a plug-in such as FedNorm makes of them, in both sums. A client without a step is left
out. Weight decay and clipping count as part of the gradient. `tau_eff=mean_steps` is sum_i p_i
tau_i, which the original program takes with mu > 0. Its server momentum is server_opt=fedavgm.
Buffers are averaged under p_i."""

from __future__ import annotations

from collections.abc import Iterator

from fedhet import check, trees
from fedhet.client import FedClient
from fedhet.errors import ConfigError
from fedhet.maths.fednova import Term, combine, normaliser
from fedhet.messages import Broadcast, Update
from fedhet.methods.fedprox import FedProxPlugin
from fedhet.setting import Setting
from fedhet.strategy import FedStrategy
from fedhet.trees import Tree

STEPS = "fednova.steps"


class FedNovaClient(FedClient):
    """FedAvg's training; tells the optimiser steps really taken."""

    def train(self, msg: Broadcast) -> Update:
        update = super().train(msg)
        update.extras[STEPS] = self.steps
        return update


class FedNova(FedStrategy):
    """Averages changes per unit of local progress, then takes the mean progress."""

    name = "fednova"
    client_cls = FedNovaClient

    def __init__(self, setting: Setting, *, tau_eff: str = "normalised") -> None:
        self.tau_eff = check.one_of("method.tau_eff", tau_eff, ("normalised", "mean_steps"))
        if setting.local.optimizer != "sgd":
            raise ConfigError(
                f"client.optimizer={setting.local.optimizer}: method=fednova knows |a_i|_1 for SGD"
                " only (client=sgd)"
            )
        self._mu = next(
            (plugin.mu for plugin in setting.plugins if isinstance(plugin, FedProxPlugin)), 0.0
        )
        try:
            normaliser(1, momentum=setting.local.momentum, eta_mu=setting.local.lr * self._mu)
        except ValueError as error:
            raise ConfigError(
                f"method=fednova with client.momentum={setting.local.momentum},"
                f" client.lr={setting.local.lr} and plugin.fedprox.mu={self._mu}: {error}"
            ) from error
        super().__init__(setting)

    def check(self, update: Update) -> None:
        update.integer(STEPS, low=0)

    def merge(self, updates: Iterator[Update], old: Tree) -> Tree:
        change, tau_eff = combine(map(self._term, updates))
        self.report = {"tau_eff": tau_eff}
        return trees.add(change, old)

    def _term(self, update: Update) -> Term:
        steps = update.integer(STEPS, low=0)
        a = normaliser(steps, momentum=self.local.momentum, eta_mu=self.local.lr * self._mu)
        return Term(update.change, update.weight, a, a if self.tau_eff == "normalised" else steps)
