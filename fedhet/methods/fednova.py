"""FedNova: averages the clients' changes per unit of local progress (Wang et al. 2020).

The paper is "Tackling the objective inconsistency problem in heterogeneous federated optimization".
The server divides each client's change by the length of its local training, so that clients with
more local steps do not pull the model towards their own optimum.

    client: w_i <- tau_i local steps from w_i = x
    server: d_i = (x - w_i) / |a_i|_1
            tau_eff = sum_i p_i |a_i|_1
            x <- x - tau_eff sum_i p_i d_i                                 (eq. 8)

    down:          x
    up:            w_i, n_i, `fednova.steps` (tau_i)
    client keeps:  nothing
    server keeps:  x

|a_i|_1 is the distance that the local solver goes in tau steps. rho is client.momentum, which
starts at 0 in each round. mu is the factor of the proximal term that plugin=[fedprox] adds:

    plain SGD      tau
    momentum       (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho)
    proximal term  (1 - (1 - lr mu)^tau) / (lr mu)

There is no such formula for momentum together with a proximal term, for Adam, and for plug-ins that
change the step of the optimiser. The method refuses them, except FedLEx's mask. Weight decay and
clipping count as part of the gradient. p_i are the aggregation weights in both sums, scaled to sum
1: n_i, or the weights of a plug-in such as FedNorm. A client that took no step does not count.
Buffers are averaged with the weights p_i.

Deviations and choices: in the paper the client sends d_i and |a_i|_1. Here it sends w_i and tau_i.
The server computes d_i and |a_i|_1 from them, because it knows the rate, the momentum and mu.

Options: `tau_eff=mean_steps` sets tau_eff = sum_i p_i tau_i, which the authors' program uses with
mu > 0. The default `normalised` is the formula above. server_opt=fedavgm is the paper's server
momentum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fedhet.core.authors import (
    AnyTree,
    Client,
    ClientContext,
    ConfigError,
    Expected,
    Merged,
    Message,
    Method,
    Result,
    RunSetup,
    State,
    Step,
    Tree,
    Update,
    serves,
    setting,
    trees,
)
from fedhet.methods.fedprox import FedProxPlugin


def normaliser(steps: int, *, momentum: float = 0.0, eta_mu: float = 0.0) -> float:
    """Return |a|_1 of a client that took tau = `steps` local steps.

    If the gradient is constant, the client's change is lr |a|_1 times the gradient:

        plain SGD               tau
        momentum rho from d=0   [tau - rho (1 - rho^tau)/(1 - rho)]/(1 - rho)
        proximal term           (1 - (1 - eta_mu)^tau)/eta_mu, with eta_mu = lr mu

    The learning rate is constant within the round. If eta_mu > 1, some of the a_j are negative. The
    result is then their sum, not the sum of their absolute values. The result is 0 if and only if
    the client took no step.

    Args:
        steps: tau, >= 0.
        momentum: rho, in [0, 1).
        eta_mu: the learning rate times FedProx's mu, in [0, 2); 0 if there is momentum.
    """
    if 0 < eta_mu < 1:
        # The naive 1 - (1 - eta_mu)^tau suffers from cancellation as eta_mu -> 0.
        return -math.expm1(steps * math.log1p(-eta_mu)) / eta_mu
    return (1 - (1 - eta_mu) ** steps) / eta_mu if eta_mu else _momentum_sum(steps, momentum)


def _momentum_sum(steps: int, rho: float) -> float:
    """Return sum_j s_j for j = 1..steps, with s_j = (1 - rho^j)/(1 - rho), by doubling.

    No term is negative, so nothing cancels. The closed form loses precision as rho -> 1.
    """
    n, last, total = 0, 0.0, 0.0  # last = s_n, total = s_1 + ... + s_n
    for bit in f"{steps:b}":  # also exact for rho = 0: s_j = 1
        n, last, total = 2 * n, last + rho**n * last, total + n * last + rho**n * total
        if bit == "1":
            n, last = n + 1, 1 + rho * last
            total += last
    return total


def combine(parts: Iterable[tuple[AnyTree, float, float, float]]) -> tuple[Tree, float]:
    """Return tau_eff sum_i p_i (w_i - x)/a_i in float64, and tau_eff = sum_i p_i tau_i.

    A part is a client's (w_i - x, p_i, a_i = |a_i|_1, tau_i). Here tau_i is |a_i|_1 or the number
    of steps. Only the ratios between the p_i matter.

    A client with a = 0 does not count. Both sums are taken in one pass, and relative to the first
    client's a. If all a_i are equal, every factor is therefore exactly 1, and the result is
    FedAvg's weighted mean, bit for bit.

    Raises:
        ValueError: no client took a step, or the sum of the weights is not positive.
    """
    total = trees.Sum()
    weight = taus = unit = 0.0
    for change, p, a, tau in parts:
        if not a:
            continue
        unit = unit or a
        total.add(change, p / (a / unit))
        weight += p
        taus += p * (tau / unit)
    if not weight > 0:
        raise ValueError(
            f"fednova: the clients that took a step have a total weight of {weight}; it must be"
            " positive"
        )
    gain = taus / weight
    factor = total.weight / weight * gain
    return trees.map(lambda t: t.mul_(factor), total.mean(reuse=True)), gain * unit


class FedNovaClient(Client):
    """Trains as in FedAvg, and sends the number of optimiser steps that it took."""

    @serves
    def train(self, msg: Message, state: State, ctx: ClientContext) -> tuple[Result, State]:
        w = ctx.fit(msg.weights)
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

    def setup(self, setup: RunSetup) -> State:
        mu = sum(plugin.mu for plugin in setup.plugins if isinstance(plugin, FedProxPlugin))
        local = setup.local
        diverges = local.lr * mu >= 2
        if diverges or (local.momentum and mu):
            refused = (
                f"lr mu={local.lr * mu}; it must be in [0, 2), otherwise the local steps diverge"
                if diverges
                else "there is no agreed formula for |a|_1 with both; set one of them to 0"
            )
            raise ConfigError(
                f"method=fednova with client.momentum={local.momentum}, client.lr={local.lr} and"
                f" plugin.fedprox.mu={mu}: {refused}"
            )
        return {"mu": mu}

    def expects(self, step: Step) -> dict[str, Expected]:
        return {"steps": Expected(low=0, whole=True, exactly=step.steps, public=True)}

    def merge(self, step: Step, state: State, old: Tree, updates: Iterator[Update]) -> Merged:
        change, tau_eff = combine(self._part(state["mu"], u) for u in updates)
        return Merged(trees.add(change, old), state, {"tau_eff": tau_eff})

    def _part(self, mu: float, u: Update) -> tuple[AnyTree, float, float, float]:
        """Return the part of one client, for `combine`."""
        local = u.sent.local
        a = normaliser(u["steps"], momentum=local.momentum, eta_mu=local.lr * mu)
        tau = a if self.tau_eff == "normalised" else u["steps"]
        return u.change, u.weight, a, tau
