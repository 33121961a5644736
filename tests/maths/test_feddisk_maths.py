"""FedDisk: the sample weights of equation 16, and the costs of equations 18 and 19."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from maths.cases import named_case
from torch import Tensor

from fedhet.core import metrics
from fedhet.methods.feddisk import densities

# ---- sample weights


def draw_p(seed: int, n: int = 30) -> Tensor:
    return torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_weights_read_literally() -> None:
    for seed in range(4):
        with named_case(seed):
            p, n_local, n_global, lo, hi = draw_p(seed), 20, 35, 0.3, 4.0
            expected = [float(q) / (1 - float(q)) * n_local / n_global for q in p]
            r = densities.density_ratio(p, n_local, n_global, 1e-6)
            np.testing.assert_allclose(r, expected, rtol=1e-12)
            clipped = [min(max(ratio, lo), hi) for ratio in expected]
            mean, low, high = sum(clipped) / len(clipped), min(clipped), max(clipped)
            assert low == lo and high == hi  # some ratios were clipped
            for normalise, weights in [
                ("mean1", [c / mean for c in clipped]),
                ("none", clipped),
                ("minmax2", [2 * (c - low) / (high - low) for c in clipped]),
            ]:
                w = densities.sample_weights(r, lo, hi, normalise)
                np.testing.assert_allclose(w, weights, rtol=1e-12, atol=1e-15)


def test_weights_have_mean_one_and_a_bounded_range() -> None:
    for seed in range(4):
        with named_case(seed):
            lo, hi = 0.1, 10.0
            r = densities.density_ratio(draw_p(seed), 1, 1, 1e-6)
            w = densities.sample_weights(r, lo, hi, "mean1")
            assert float(w.mean()) == pytest.approx(1, rel=1e-12)
            assert float(w.max() / w.min()) <= hi / lo * (1 + 1e-12)
            clipped = float(r.max()) > hi or float(r.min()) < lo
            assert (w.argsort() == draw_p(seed).argsort()).all() or clipped
            assert 1 <= densities.effective_size(w) <= len(w)


def test_a_constant_probability_gives_ones() -> None:
    for p in [0.0, 0.2, 0.5, 1.0]:
        with named_case(p):
            r = densities.density_ratio(torch.full((9,), p), 3, 4, 1e-6)
            for normalise in ("mean1", "minmax2"):
                w = densities.sample_weights(r, 0.1, 10.0, normalise)
                assert torch.equal(w, torch.ones(9, dtype=torch.float64))


def test_effective_size() -> None:
    assert densities.effective_size(torch.full((8,), 3.0)) == pytest.approx(8)
    assert densities.effective_size(torch.tensor([0.0, 5.0, 0.0])) == pytest.approx(1)


# ---- communication


def test_the_costs_of_the_paper() -> None:
    """Tables 1 and 2 into equations 18 and 19 give what Figure 6 and the text say."""
    cases = [
        (102_000, 39_000, (80, 100), 440, (24.1e6, 34.3e6)),
        (614_000, 447_000, (15, 105), 1015, (112e6, 907e6)),
        (47_000, 12_000, (70, 85), 500, (8.6e6, 12.0e6)),
    ]
    for made, clf, rounds, other, costs in cases:
        with named_case(made, clf, rounds, other, costs):
            first, second = rounds
            assert metrics.comm_cost(clf, second, made, first) == pytest.approx(costs[0], rel=5e-3)
            assert metrics.comm_cost(clf, other) == pytest.approx(costs[1], rel=5e-3)


def test_effective_rounds() -> None:
    accuracy = torch.tensor([0.1, 0.5, 0.4, 0.7, 0.7, 0.6])
    assert metrics.effective_rounds(accuracy) == 4
    assert metrics.effective_rounds(accuracy, 0.45) == 2
    assert metrics.effective_rounds(accuracy, 0.71) is None
