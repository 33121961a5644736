"""FedNova: the normaliser against the recursions that it sums, and properties of `combine`."""

from __future__ import annotations

import pytest
import torch
from maths.cases import named_case

from fedhet.core import trees
from fedhet.core.trees import Tree
from fedhet.methods.fednova import combine, normaliser


def moved(steps: int, momentum: float = 0.0, eta_mu: float = 0.0) -> float:
    """x - w after `steps` steps of rate 1 on a constant gradient of 1.

    The momentum starts at zero, and the proximal term pulls with eta_mu (w - x).
    """
    distance = d = 0.0
    for _ in range(steps):
        d = momentum * d + 1.0 - eta_mu * distance
        distance += d
    return distance


def test_it_is_the_distance_under_a_constant_gradient() -> None:
    for steps in [0, 1, 2, 7, 50]:
        for kind in [
            {},
            {"momentum": 0.5},
            {"momentum": 0.9},
            {"eta_mu": 0.01},
            {"eta_mu": 0.7},
            {"eta_mu": 1.5},
        ]:
            with named_case(steps, kind):
                assert normaliser(steps, **kind) == pytest.approx(moved(steps, **kind), rel=1e-12)


def test_a_proximal_term_that_vanishes_is_plain_sgd() -> None:
    """tau - tau (tau - 1) eta_mu/2 + ..., without loss of digits in 1 - (1 - eta_mu)^tau."""
    for steps in [1, 10, 5000]:
        for eta_mu in [1e-12, 1e-15, 1e-17, 1e-300]:
            with named_case(steps, eta_mu):
                assert normaliser(steps, eta_mu=eta_mu) == pytest.approx(
                    steps, rel=max(1e-12, steps * eta_mu)
                )


def test_momentum_near_one_is_the_triangular_number() -> None:
    """With rho = 1 - short, the sum over j of (1 - rho^j)/(1 - rho) is expanded in short.

    Each term is j - j (j - 1)/2 short + ...; the sum is tau (tau + 1)/2 - (tau^3 - tau)/6 short
    + ...
    """
    for steps in [1, 10, 999, 4096]:
        for short in [1e-5, 1e-8, 1e-16]:
            with named_case(steps, short):
                expected = steps * (steps + 1) / 2 - (steps**3 - steps) / 6 * short
                actual = normaliser(steps, momentum=1 - short)
                assert actual == pytest.approx(expected, rel=max(1e-12, (steps * short) ** 2))


def test_it_is_zero_without_a_step_and_only_then() -> None:
    """By this, `combine` recognises the clients to leave out."""
    cases = [
        {"momentum": 1 - 2.0**-53},
        {"eta_mu": 5e-324},
        {"eta_mu": 1 - 2.0**-53},
        {"eta_mu": 1.0},
        {"eta_mu": 2 - 2.0**-52},
    ]
    for kind in cases:
        with named_case(kind):
            assert normaliser(0, **kind) == 0
            assert all(normaliser(steps, **kind) > 0 for steps in range(1, 60))


def parts(a: list[float], weights: list[float]) -> list[tuple[Tree, float, float, float]]:
    g = torch.Generator().manual_seed(1)
    return [
        ({"x": torch.randn(5, generator=g)}, weight, a_i, a_i)
        for a_i, weight in zip(a, weights, strict=True)
    ]


def test_equal_work_is_the_weighted_mean_bit_for_bit() -> None:
    for weights in [[3.0, 8.0, 5.0], [0.1, 0.7, 0.2]]:
        for a in [7.0, 10 / 3]:
            with named_case(weights, a):
                given = parts([a] * 3, weights)
                combined, tau_eff = combine(given)
                mean = trees.mean((change, weight) for change, weight, *_ in given)
                assert torch.equal(combined["x"], mean["x"])
                assert tau_eff == a


def test_only_ratios_of_weights_count_and_the_order_does_not() -> None:
    a, weights = [2.0, 9.0, 4.0], [3.0, 8.0, 5.0]
    combined, tau_eff = combine(parts(a, weights))
    scaled, scaled_tau_eff = combine(parts(a, [weight / 16 for weight in weights]))
    turned, _ = combine(parts(a, weights)[::-1])
    torch.testing.assert_close(combined["x"], scaled["x"], rtol=1e-14, atol=0)
    torch.testing.assert_close(combined["x"], turned["x"], rtol=1e-12, atol=1e-14)
    assert tau_eff == pytest.approx(scaled_tau_eff) == pytest.approx((6 + 72 + 20) / 16)


def test_a_client_without_a_step_is_left_out() -> None:
    given = parts([0.0, 9.0, 4.0], [3.0, 8.0, 5.0])
    assert torch.equal(combine(given)[0]["x"], combine(given[1:])[0]["x"])
    with pytest.raises(ValueError, match=r"weight .*0.*positive"):
        combine(parts([0.0, 0.0], [1.0, 2.0]))


def test_weights_of_sum_zero_are_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        combine(parts([1.0, 2.0], [0.0, 0.0]))
