"""FedNorm, equations 3 to 8: closed forms, and properties that hold for every input."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from maths.cases import named_case
from torch import Tensor

from fedhet.methods.fednorm import contribution, similarity

SEEDS = range(6)


def draw(
    seed: int, clients: int = 7, d: int = 5, *, signed: bool = False
) -> tuple[Tensor, Tensor, float]:
    """Latents, host weights of sum 1, and a temperature."""
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(clients, d, generator=g, dtype=torch.float64)
    nu = torch.rand(clients, generator=g, dtype=torch.float64) + 0.05
    return z if signed else z.abs(), nu / nu.sum(), float(0.1 + 2 * torch.rand((), generator=g))


def test_the_equations_read_literally() -> None:
    """Loops over clients, in the paper's notation.

    T is large enough that the naive exponentials do not overflow.
    """
    for seed in SEEDS:
        with named_case(seed):
            z, nu, temperature = draw(seed, signed=bool(seed % 2))
            clients = len(nu)
            s = np.ones((clients, clients))
            for r in range(clients):
                for p in range(clients):
                    if r != p:  # eq. 3, 4
                        lengths = float(z[r] @ z[r]) ** 0.5 * float(z[p] @ z[p]) ** 0.5
                        s[r, p] = float(z[r] @ z[p]) / lengths
            e = [
                math.exp(sum(s[q, p] for p in range(clients)) / temperature) for q in range(clients)
            ]
            # eq. 8
            factors = [sum(e[q] for q in range(clients) if q != r) / sum(e) for r in range(clients)]
            dot = sum(factors[r] * float(nu[r]) for r in range(clients))
            weights = [factors[r] * float(nu[r]) / dot for r in range(clients)]  # eq. 7
            actual = contribution(z, nu, temperature)
            np.testing.assert_allclose(actual.similarity, s, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(actual.factors, factors, rtol=1e-10)
            np.testing.assert_allclose(actual.weights, weights, rtol=1e-10)


def test_bounds() -> None:
    for seed in SEEDS:
        with named_case(seed):
            z, nu, temperature = draw(seed, signed=True)
            _, factors, weights = contribution(z, nu, temperature)
            assert float(factors.sum()) == pytest.approx(len(nu) - 1, rel=1e-12)
            assert (factors >= 0).all() and (factors <= 1).all()
            assert float(weights.sum()) == pytest.approx(1, rel=1e-12)
            total_variation = float((weights - nu).abs().sum()) / 2
            assert total_variation <= float(nu.max()) + 1e-12
            uniform = contribution(z, torch.ones_like(nu), temperature)
            assert float(uniform.weights.max()) <= 1 / (len(nu) - 1) + 1e-12


def test_scales_of_latents_and_of_host_weights_do_not_matter() -> None:
    for seed in SEEDS:
        with named_case(seed):
            z, nu, temperature = draw(seed, signed=True)
            scales = torch.logspace(-150, 150, len(nu), dtype=torch.float64)
            plain = contribution(z, nu, temperature)
            scaled = contribution(z * scales[:, None], 1e3 * nu, temperature)
            torch.testing.assert_close(scaled.similarity, plain.similarity, rtol=0, atol=1e-12)
            torch.testing.assert_close(scaled.weights, plain.weights, rtol=1e-10, atol=0)


def test_permuting_the_clients_permutes_the_weights() -> None:
    for seed in SEEDS:
        with named_case(seed):
            z, nu, temperature = draw(seed)
            order = torch.randperm(len(nu), generator=torch.Generator().manual_seed(seed))
            plain = contribution(z, nu, temperature)
            permuted = contribution(z[order], nu[order], temperature)
            torch.testing.assert_close(permuted.weights, plain.weights[order], rtol=1e-12, atol=0)
            expected = plain.similarity[order][:, order]
            torch.testing.assert_close(permuted.similarity, expected, rtol=0, atol=1e-14)


def test_a_host_weight_of_zero_stays_zero() -> None:
    z, nu, temperature = draw(0)
    nu[2] = 0
    weights = contribution(z, nu, temperature).weights
    assert float(weights[2]) == 0 and (weights[[0, 1, 3, 4, 5, 6]] > 0).all()


def test_identical_latents_and_high_temperature_give_the_host() -> None:
    z, nu, _ = draw(1)
    identical = z[:1].expand(len(nu), -1)
    torch.testing.assert_close(contribution(identical, nu, 0.5).weights, nu, rtol=1e-12, atol=0)
    torch.testing.assert_close(contribution(z, nu, 1e12).weights, nu, rtol=1e-10, atol=0)


def test_low_temperature_removes_the_most_central_client_only() -> None:
    z, nu, _ = draw(2)
    central = int(similarity(z).sum(1).argmax())
    rest = nu.clone()
    rest[central] = 0
    weights = contribution(z, nu, 1e-4).weights
    torch.testing.assert_close(weights, rest / rest.sum(), rtol=1e-9, atol=1e-12)


def test_one_and_two_participants() -> None:
    z, nu, temperature = draw(3, clients=2)
    torch.testing.assert_close(contribution(z, nu, temperature).weights, nu, rtol=1e-12, atol=0)
    alone = contribution(z[:1], nu[:1], temperature)
    assert alone.weights.tolist() == [1.0] and alone.factors.tolist() == [0.0]


def test_rounding_does_not_choose_among_equally_central_clients() -> None:
    """Two clients, or clients whose latents have one direction, keep the host's weights.

    This holds at any temperature.
    """
    for clients in [2, 5, 50]:
        with named_case(clients):
            for seed in range(50):
                z, nu, _ = draw(seed, clients, d=1 + 4 * seed, signed=True)
                if clients > 2:
                    z = z[:1] * torch.linspace(0.1, 3, clients, dtype=torch.float64)[:, None]
                s = similarity(z)
                assert torch.equal(s, s.T)
                torch.testing.assert_close(
                    contribution(z, nu, 1e-9).weights, nu, rtol=1e-12, atol=0
                )


def test_a_difference_above_rounding_still_counts_at_a_tiny_temperature() -> None:
    """With angles 0, t, 3t, the row sums fall short of 3 by 5, 2.5 and 6.5 t^2.

    The second client is thus the most central, by 2.5e-10.
    """
    angles = 1e-5 * torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)
    z = torch.stack([angles.cos(), angles.sin()], 1)
    weights = contribution(z, torch.ones(3), 1e-12).weights
    expected = torch.tensor([0.5, 0.0, 0.5], dtype=torch.float64)
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)


def test_the_weight_of_an_outlier_is_raised_not_lowered() -> None:
    """Two clients agree, and one is orthogonal to them.

    With T = 1 and uniform nu, w_3 = e/(2e + 1), where the host's weight is 1/3.
    """
    z = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]])
    weights = contribution(z, torch.ones(3), 1.0).weights
    # Row sums are 2, 2, 1; Lambda = (e^2 + e, e^2 + e, 2 e^2) / (2 e^2 + e).
    assert float(weights[2]) == pytest.approx(math.e / (2 * math.e + 1), rel=1e-12)
    assert float(weights[2]) > 1 / 3 > float(weights[0])


def test_many_similar_clients_at_a_tiny_temperature_stay_finite() -> None:
    z = 1 + 1e-3 * draw(4, clients=300)[0]
    _, factors, weights = contribution(z, torch.ones(300), 1e-3)  # naive exponents of 300,000
    assert torch.isfinite(factors).all()
    assert float(weights.sum()) == pytest.approx(1, rel=1e-9)


def test_a_zero_vector_has_cosine_zero_with_all_others() -> None:
    z = torch.tensor([[0.0, 0.0], [1.0, 2.0], [-1.0, 3.0]])
    s = similarity(z)
    assert s[0].tolist() == [1.0, 0.0, 0.0] and s[:, 0].tolist() == [1.0, 0.0, 0.0]
    assert float(s[1, 2]) == pytest.approx(5 / 50**0.5, rel=1e-12)


NAN, INF = float("nan"), float("inf")
GOOD = torch.ones(3, 2)
