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

Deviations and choices: its client sends d_i and |a_i|_1. Here it sends w_i and tau_i, from which
the server forms both, because it knows the rate, the momentum and mu.

Options: `tau_eff=mean_steps` sets tau_eff = sum_i p_i tau_i, which the authors' program uses with
mu > 0; the default `normalised` is the formula above. The paper's server momentum is
server_opt=fedavgm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fedhet.core import trees
from fedhet.core.check import setting
from fedhet.core.client.site import Site
from fedhet.core.errors import ConfigError
from fedhet.core.kernel import (
    Client,
    Expected,
    Merged,
    Message,
    Method,
    Result,
    State,
    Step,
    Update,
    serves,
)
from fedhet.core.server.setting import Setting
from fedhet.core.trees import AnyTree, Tree
from fedhet.methods.fedprox import FedProxPlugin


def normaliser(steps: int, *, momentum: float = 0.0, eta_mu: float = 0.0) -> float:
    """Return |a|_1 of a client that took tau = `steps` local steps.

    Under a constant gradient, the client's change is lr |a|_1 times that gradient:

        plain SGD               tau
        momentum rho from d=0   [tau - rho (1 - rho^tau)/(1 - rho)]/(1 - rho)
        proximal term           (1 - (1 - eta_mu)^tau)/eta_mu, where eta_mu = lr mu

    The learning rate is constant within the round. Above eta_mu = 1, some of the a_j are negative;
    the result is then their sum, not the sum of their absolute values. It is 0 if and only if
    there was no step.

    Args:
        steps: tau, >= 0.
        momentum: rho, in [0, 1).
        eta_mu: the learning rate times FedProx's mu, in [0, 2).

    Raises:
        ValueError: `eta_mu` is out of range, or momentum and a proximal term are both set, for
            which there is no agreed formula.
    """
    if not 0 <= eta_mu < 2:
        raise ValueError(f"lr mu={eta_mu}; it must be in [0, 2), otherwise the local steps diverge")
    if momentum and eta_mu:
        raise ValueError(
            f"momentum={momentum} together with lr mu={eta_mu}: there is no agreed formula for"
            " |a|_1; set one of them to 0"
        )
    if momentum:
        return _momentum_sum(steps, momentum)
    if 0 < eta_mu < 1:
        # The naive 1 - (1 - eta_mu)^tau suffers from cancellation as eta_mu -> 0.
        return -math.expm1(steps * math.log1p(-eta_mu)) / eta_mu
    if eta_mu:
        return (1 - (1 - eta_mu) ** steps) / eta_mu
    return float(steps)


def _momentum_sum(steps: int, rho: float) -> float:
    """Return sum_j s_j for j = 1..steps, where s_j = (1 - rho^j)/(1 - rho), by doubling.

    No term is negative, whereas the closed form suffers from cancellation as rho -> 1.
    """
    n = 0
    last = 0.0  # s_n
    total = 0.0  # s_1 + ... + s_n
    for bit in f"{steps:b}":
        n, last, total = 2 * n, last + rho**n * last, total + n * last + rho**n * total
        if bit == "1":
            n, last = n + 1, 1 + rho * last
            total += last
    return total


class Part(NamedTuple):
    """What `combine` takes of one client.

    Attributes:
        change: w_i - x, its model minus the global one.
        weight: p_i; only the ratios between clients matter.
        a: |a_i|_1.
        tau: its part tau_i of tau_eff, which is |a_i|_1 or the number of steps.
    """

    change: AnyTree
    weight: float
    a: float
    tau: float


def combine(parts: Iterable[Part]) -> tuple[Tree, float]:
    """Return tau_eff sum_i p_i (w_i - x)/a_i in float64, and tau_eff = sum_i p_i tau_i.

    A client with a = 0 is left out. Both sums are taken in one pass and relative to the first
    client's a: where all a_i are equal, every factor is exactly 1, and the result is FedAvg's
    weighted mean, bit for bit.

    Raises:
        ValueError: no client took a step, or the sum of the weights is not positive.
    """
    total = trees.Sum()
    weight = 0.0
    taus = 0.0
    unit = 0.0
    for part in parts:
        if not part.a:
            continue
        unit = unit or part.a
        total.add(part.change, part.weight / (part.a / unit))
        weight += part.weight
        taus += part.weight * (part.tau / unit)
    if not weight > 0:
        raise ValueError(
            f"the clients that took a step have a total weight of {weight}; it must be positive"
        )
    gain = taus / weight
    factor = total.weight / weight * gain
    return trees.map(lambda t: t.mul_(factor), total.mean(reuse=True)), gain * unit


class FedNovaClient(Client):
    """Trains as in FedAvg, and sends the number of optimiser steps that it has really taken."""

    @serves
    def train(self, msg: Message, state: State, site: Site) -> tuple[Result, State]:
        w = site.fit(msg.weights)
        return Result(w.params, {"steps": w.steps}), state


@dataclass(frozen=True, kw_only=True)
class FedNova(Method):
    """Takes the mean direction of the clients, and moves the model by their mean progress.

    The server's state is "mu", the factor of the proximal term; it does not change.
    """

    name = "fednova"
    client = FedNovaClient
    needs = frozenset({"sgd steps"})
    breaks = dict.fromkeys(("means", "weights alone"), "numbers of steps")

    tau_eff: str = setting("normalised", allowed=("normalised", "mean_steps"))

    def setup(self, setting: Setting) -> State:
        factors = [plugin.mu for plugin in setting.plugins if isinstance(plugin, FedProxPlugin)]
        mu, local = sum(factors), setting.local
        try:
            normaliser(1, momentum=local.momentum, eta_mu=local.lr * mu)
        except ValueError as error:
            raise ConfigError(
                f"method=fednova with client.momentum={local.momentum}, client.lr={local.lr} and"
                f" plugin.fedprox.mu={mu}: {error}"
            ) from error
        return {"mu": mu}

    def expects(self, step: Step) -> dict[str, Expected]:
        return {"steps": Expected(low=0, whole=True, exactly=step.steps, public=True)}

    def merge(self, step: Step, state: State, old: Tree, updates: Iterator[Update]) -> Merged:
        change, tau_eff = combine(self._part(state["mu"], u) for u in updates)
        return Merged(trees.add(change, old), state, {"tau_eff": tau_eff})

    def _part(self, mu: float, u: Update) -> Part:
        local = u.sent.local
        a = normaliser(u["steps"], momentum=local.momentum, eta_mu=local.lr * mu)
        tau = a if self.tau_eff == "normalised" else u["steps"]
        return Part(u.change, u.weight, a, tau)
