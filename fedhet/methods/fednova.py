"""FedNova: averages the clients' changes per unit of local progress (Wang et al. 2020).

The paper is "Tackling the objective inconsistency problem in heterogeneous federated optimization".

    client: w_i <- tau_i local steps from w_i = x
    server: d_i = (x - w_i) / |a_i|_1
            tau_eff = sum_i p_i |a_i|_1
            x <- x - tau_eff sum_i p_i d_i                                 (eq. 8)

    down:          x
    up:            w_i, n_i, `fednova.steps` (tau_i)
    client keeps:  nothing
    server keeps:  x

|a_i|_1 says how far the local solver goes in tau steps. rho is client.momentum, which starts at 0
in each round; mu is the factor of the proximal term that plugin=[fedprox] adds:

    plain SGD      tau
    momentum       (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho)
    proximal term  (1 - (1 - lr mu)^tau) / (lr mu)

Momentum together with a proximal term, Adam, and optimisers that plug-ins wrap, except by FedLEx's
mask, have no such formula and are refused. Weight decay
and clipping count as part of the gradient. p_i are the aggregation weights in both sums: n_i, or
what a plug-in such as FedNorm makes of them, scaled to sum 1. A client that took no step is left
out. Buffers are averaged under p_i.

Deviation from the paper: its client sends d_i and |a_i|_1. Here it sends w_i and tau_i, from which
the server forms both, because it knows the rate, the momentum and mu.

Options: `tau_eff=mean_steps` sets tau_eff = sum_i p_i tau_i, which the authors' program uses with
mu > 0; the default `normalised` is the formula above. The paper's server momentum is
server_opt=fedavgm.
"""

from __future__ import annotations

from collections.abc import Iterator

from fedhet.core import check, trees
from fedhet.core.admission import check_steps
from fedhet.core.client import FedClient
from fedhet.core.errors import ConfigError
from fedhet.core.messages import Broadcast, LocalSettings, Update
from fedhet.core.setting import Setting
from fedhet.core.strategy import FedStrategy
from fedhet.core.trees import Tree
from fedhet.maths.fednova import Term, combine, normaliser
from fedhet.methods.fedprox import FedProxPlugin

STEPS = "fednova.steps"


class FedNovaClient(FedClient):
    """Trains as in FedAvg, and sends the number of optimiser steps that it has really taken."""

    public = (STEPS,)

    def train(self, msg: Broadcast) -> Update:
        update = super().train(msg)
        update.extras[STEPS] = self.steps
        return update


class FedNova(FedStrategy):
    """Takes the mean direction of the clients, and moves the model by their mean progress."""

    name = "fednova"
    client_cls = FedNovaClient
    sgd_steps = True
    counts_steps = True
    enters = "numbers of steps"

    def __init__(self, setting: Setting, *, tau_eff: str = "normalised") -> None:
        self.tau_eff = check.one_of("method.tau_eff", tau_eff, ("normalised", "mean_steps"))
        factors = [plugin.mu for plugin in setting.plugins if isinstance(plugin, FedProxPlugin)]
        self._mu = factors[0] if factors else 0.0
        try:
            self._normaliser(1, setting.local)
        except ValueError as error:
            raise ConfigError(
                f"method=fednova with client.momentum={setting.local.momentum},"
                f" client.lr={setting.local.lr} and plugin.fedprox.mu={self._mu}: {error}"
            ) from error
        super().__init__(setting)

    def check(self, update: Update) -> None:
        check_steps(self, update, STEPS)

    def merge(self, updates: Iterator[Update], old: Tree) -> Tree:
        change, tau_eff = combine(map(self._term, updates))
        self.report = {"tau_eff": tau_eff}
        return trees.add(change, old)

    def _term(self, update: Update) -> Term:
        steps = update.integer(STEPS)
        a = self._normaliser(steps, self.local)
        tau = a if self.tau_eff == "normalised" else steps
        return Term(update.change, update.weight, a, tau)

    def _normaliser(self, steps: int, local: LocalSettings) -> float:
        """|a_i|_1 after so many steps."""
        return normaliser(steps, momentum=local.momentum, eta_mu=local.lr * self._mu)
