"""FedNova (Wang et al. 2020, "Tackling the objective inconsistency problem in heterogeneous
federated optimization")."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from fedhet import trees
from fedhet.trees import AnyTree, Tree


def normaliser(steps: int, *, momentum: float = 0.0, eta_mu: float = 0.0) -> float:
    """|a|_1: by what a client's change after `steps` steps exceeds lr times a constant gradient.

    plain SGD: tau;  momentum rho from d = 0: [tau - rho (1 - rho^tau)/(1 - rho)]/(1 - rho);
    proximal term, eta_mu = lr mu: (1 - (1 - eta_mu)^tau)/eta_mu. The rate is constant within the
    round. Above eta_mu = 1 this is the sum of the a_j, some of which are negative, not of their
    absolute values. It is 0 without a step, and only then.

    Raises: ValueError: a value is out of range, or momentum comes with a proximal term: for that no
        formula is agreed.
    """
    if steps < 0 or steps != int(steps):
        raise ValueError(f"steps={steps}; a whole number >= 0 is expected")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum={momentum}; it must be in [0, 1)")
    if not 0 <= eta_mu < 2:
        raise ValueError(f"lr mu={eta_mu}; it must be in [0, 2), or local steps diverge")
    if momentum and eta_mu:
        raise ValueError(
            f"momentum={momentum} together with lr mu={eta_mu}: there is no agreed formula for"
            " |a|_1; set one of them to 0"
        )
    if momentum:
        return _momentum_sum(steps, momentum)
    if 0 < eta_mu < 1:
        # 1 - (1 - eta_mu)^tau cancels as eta_mu -> 0
        return -math.expm1(steps * math.log1p(-eta_mu)) / eta_mu
    if eta_mu:
        return (1 - (1 - eta_mu) ** steps) / eta_mu
    return float(steps)


def _momentum_sum(steps: int, rho: float) -> float:
    """sum_j s_j, s_j = (1 - rho^j)/(1 - rho), j = 1..steps, by doubling: no term is negative, while
    the closed form cancels as rho -> 1."""
    n, last, total = 0, 0.0, 0.0  # s_n, and the sum up to it
    for bit in f"{steps:b}":
        n, last, total = 2 * n, last + rho**n * last, total + n * last + rho**n * total
        if bit == "1":
            n, last = n + 1, 1 + rho * last
            total += last
    return total


class Term(NamedTuple):
    """One client: its change w_i - x, its weight p_i (only ratios count), a = |a_i|_1, and its part
    in tau_eff (a, or the steps)."""

    change: AnyTree
    weight: float
    a: float
    tau: float


def combine(terms: Iterable[Term]) -> tuple[Tree, float]:
    """(tau_eff sum_i p_i (w_i - x)/a_i, tau_eff = sum_i p_i tau_i), float64, in one pass; a client
    with a = 0 is left out.

    Both sums are taken relative to the first client's a: where all a_i are equal, every factor is
    exactly 1, and the result is FedAvg's weighted mean, bit for bit.

    Raises:
        ValueError: nobody took a step, or the weights' sum is not positive.
    """
    total, weight, taus, unit = trees.Sum(), 0.0, 0.0, 0.0
    for term in terms:
        if not term.a:
            continue
        unit = unit or term.a
        total.add(term.change, term.weight / (term.a / unit))
        weight += term.weight
        taus += term.weight * (term.tau / unit)
    if not weight > 0:
        raise ValueError(
            f"the clients that took a step have the total weight {weight}; it must be positive"
        )
    gain = taus / weight
    factor = total.weight / weight * gain
    return trees.map(lambda t: t.mul_(factor), total.mean(reuse=True)), gain * unit
