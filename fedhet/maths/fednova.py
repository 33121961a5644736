"""FedNova (Wang et al. 2020): normalised averaging.

"Tackling the objective inconsistency problem in heterogeneous federated optimization".
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from fedhet.core import trees
from fedhet.core.trees import AnyTree, Tree


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
        ValueError: a value is out of range, or momentum and a proximal term are both set, for
            which there is no agreed formula.
    """
    if steps < 0 or steps != int(steps):
        raise ValueError(f"steps={steps}; it must be an integer >= 0")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum={momentum}; it must be in [0, 1)")
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


class Term(NamedTuple):
    """One client's contribution to `combine`.

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


def combine(terms: Iterable[Term]) -> tuple[Tree, float]:
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
    for term in terms:
        if not term.a:
            continue
        unit = unit or term.a
        total.add(term.change, term.weight / (term.a / unit))
        weight += term.weight
        taus += term.weight * (term.tau / unit)
    if not weight > 0:
        raise ValueError(
            f"the clients that took a step have a total weight of {weight}; it must be positive"
        )
    gain = taus / weight
    factor = total.weight / weight * gain
    return trees.map(lambda t: t.mul_(factor), total.mean(reuse=True)), gain * unit
