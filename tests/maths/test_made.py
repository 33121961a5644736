"""FedDisk's MADE is a normalised autoregressive density, and samples follow it."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
from maths.cases import named_case
from torch import Tensor

from fedhet.core.trees import Tree
from fedhet.methods.feddisk import densities

SIZES = [(1, 3), (2, 1), (4, 9), (6, 4), (7, 50)]


def made(dim: int, hidden: int, seed: int = 0, scale: float = 3.0) -> Tree:
    weights = densities.initial(dim, hidden, torch.Generator().manual_seed(seed))
    return {name: t.double() * scale for name, t in weights.items()}


def mask_of(dim: int, hidden: int, kind: str) -> densities.Masks:
    return densities.masks(dim, hidden, kind, seed=3)


def cube(dim: int) -> Tensor:
    """All binary vectors."""
    return torch.tensor(list(itertools.product([0.0, 1.0], repeat=dim)), dtype=torch.float64)


def uniform(*shape: int, seed: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_masks_read_literally() -> None:
    for kind in ["even", "random"]:
        for dim, hidden in SIZES:
            with named_case(kind, dim, hidden):
                mask = mask_of(dim, hidden, kind)
                m = mask.m1.sum(1).int().tolist()
                assert all(1 <= degree <= max(dim - 1, 1) for degree in m)
                if kind == "even":
                    assert m == [1 + math.floor(k * (dim - 1) / hidden) for k in range(hidden)]
                for k, d in itertools.product(range(hidden), range(1, dim + 1)):
                    assert mask.m1[k, d - 1] == (m[k] >= d)
                    assert mask.m2[d - 1, k] == (d > m[k])


def test_even_degrees_use_every_degree_equally_often() -> None:
    counts = torch.bincount(densities.masks(8, 70).m1.sum(1).int())[1:]
    assert counts.tolist() == [10] * 7


def test_the_jacobian_is_strictly_lower_triangular() -> None:
    """Output d depends on x_<d only, and on all of them if there are enough hidden units."""
    for kind in ["even", "random"]:
        for dim, hidden in SIZES:
            with named_case(kind, dim, hidden):
                mask, weights = mask_of(dim, hidden, kind), made(dim, hidden)
                # All ReLUs are active: every path has a derivative.
                weights["b1"] = weights["b1"].abs() + 10
                logits = partial(densities.logits, weights, mask)
                jacobian = torch.autograd.functional.jacobian(
                    logits, uniform(1, dim, seed=1)
                ).squeeze((0, 2))
                assert torch.count_nonzero(jacobian.triu()) == 0
                assert torch.equal(jacobian != 0, mask.m2 @ mask.m1 != 0)
                if hidden >= dim and kind == "even":
                    assert torch.count_nonzero(jacobian) == dim * (dim - 1) // 2


def test_it_is_a_normalised_density() -> None:
    for dim, hidden in SIZES[:-1]:
        with named_case(dim, hidden):
            mask = densities.masks(dim, hidden)
            total = (-densities.nll(made(dim, hidden), mask, cube(dim))).exp().sum()
            assert float(total) == pytest.approx(1, rel=1e-12)


def test_the_first_output_is_a_constant_and_soft_targets_give_cross_entropies() -> None:
    weights, mask, x = made(5, 8), densities.masks(5, 8), uniform(6, 5, seed=0)
    out = densities.logits(weights, mask, x).sigmoid()
    assert torch.equal(out[:, 0], weights["b2"][0].sigmoid().expand(6))
    expected = -(x * out.log() + (1 - x) * (1 - out).log()).sum(1)
    torch.testing.assert_close(densities.nll(weights, mask, x), expected)


def test_sampling_is_the_definition_step_by_step() -> None:
    for kind in ["even", "random"]:
        for dim, hidden in SIZES:
            with named_case(kind, dim, hidden):
                weights, mask = made(dim, hidden), mask_of(dim, hidden, kind)
                uniforms = uniform(40, dim, seed=2)
                x = torch.full_like(uniforms, 0.3)  # entries that are not drawn yet must not matter
                for d in range(dim):
                    x[:, d] = (
                        uniforms[:, d] < densities.logits(weights, mask, x).sigmoid()[:, d]
                    ).double()
                assert torch.equal(densities.sample(weights, mask, uniforms), x)


def test_samples_follow_the_density() -> None:
    dim, n = 3, 40_000
    weights, mask = made(dim, 12), densities.masks(dim, 12)
    x = densities.sample(weights, mask, uniform(n, dim, seed=4))
    numbers = (x @ torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64)).long()
    shares = torch.bincount(numbers, minlength=8) / n
    p = (-densities.nll(weights, mask, cube(dim))).exp()
    assert p.max() / p.min() > 3
    assert ((shares - p).abs() < 5 * (p * (1 - p) / n).sqrt()).all()
