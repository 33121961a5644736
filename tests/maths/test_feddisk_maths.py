"""FedDisk: MADE is a normalised autoregressive density, weights are what equation 16 and the ruling
say, costs are the paper's."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fedhet.maths import feddisk
from fedhet.messages import LocalSettings
from fedhet.methods.feddisk import networks as density
from fedhet.phases import EarlyStopping
from fedhet.trees import Tree

SIZES = [(1, 3), (2, 1), (4, 9), (6, 4), (7, 50)]


def made(dim: int, hidden: int, seed: int = 0, scale: float = 3.0) -> Tree:
    found = feddisk.initial(dim, hidden, torch.Generator().manual_seed(seed))
    return {name: t.double() * scale for name, t in found.items()}


def mask_of(dim: int, hidden: int, kind: str) -> feddisk.Masks:
    return feddisk.masks(dim, hidden, np.random.default_rng(3) if kind == "random" else None)


def cube(dim: int) -> Tensor:
    """All binary vectors."""
    return torch.tensor(list(itertools.product([0.0, 1.0], repeat=dim)), dtype=torch.float64)


@pytest.mark.parametrize("kind", ["even", "random"])
@pytest.mark.parametrize(("dim", "hidden"), SIZES)
def test_masks_read_literally(dim: int, hidden: int, kind: str) -> None:
    mask = mask_of(dim, hidden, kind)
    m = mask.degrees.tolist()
    assert all(1 <= degree <= max(dim - 1, 1) for degree in m)
    if kind == "even":
        assert m == [1 + math.floor(k * (dim - 1) / hidden) for k in range(hidden)]
    for k, d in itertools.product(range(hidden), range(1, dim + 1)):
        assert mask.m1[k, d - 1] == (m[k] >= d)
        assert mask.m2[d - 1, k] == (d > m[k])


def test_even_degrees_use_every_degree_as_often() -> None:
    counts = torch.bincount(feddisk.masks(8, 70).degrees)[1:]
    assert counts.tolist() == [10] * 7


@pytest.mark.parametrize(("dim", "hidden"), [(0, 4), (4, 0), (-1, 2)])
def test_impossible_sizes_are_refused(dim: int, hidden: int) -> None:
    with pytest.raises(ValueError, match=f"{dim} inputs and {hidden} hidden"):
        feddisk.masks(dim, hidden)


@pytest.mark.parametrize("kind", ["even", "random"])
@pytest.mark.parametrize(("dim", "hidden"), SIZES)
def test_the_jacobian_is_strictly_lower_triangular(dim: int, hidden: int, kind: str) -> None:
    """Output d depends on x_<d only; on all of them where there are enough hidden units."""
    mask, weights = mask_of(dim, hidden, kind), made(dim, hidden)
    weights["b1"] = weights["b1"].abs() + 10  # every ReLU open: a path is a derivative
    x = torch.rand(dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    jacobian = torch.autograd.functional.jacobian(
        lambda v: feddisk.logits(weights, mask, v[None])[0], x
    )
    assert torch.count_nonzero(jacobian.triu()) == 0
    assert torch.equal(jacobian != 0, mask.m2 @ mask.m1 != 0)
    if hidden >= dim and kind == "even":
        assert torch.count_nonzero(jacobian) == dim * (dim - 1) // 2


@pytest.mark.parametrize(("dim", "hidden"), SIZES[:-1])
def test_it_is_a_normalised_density(dim: int, hidden: int) -> None:
    total = (-feddisk.nll(made(dim, hidden), feddisk.masks(dim, hidden), cube(dim))).exp().sum()
    assert float(total) == pytest.approx(1, rel=1e-12)


def test_the_first_output_is_a_constant_and_soft_targets_are_cross_entropies() -> None:
    weights, mask = made(5, 8), feddisk.masks(5, 8)
    x = torch.rand(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    out = feddisk.logits(weights, mask, x).sigmoid()
    assert torch.equal(out[:, 0], weights["b2"][0].sigmoid().expand(6))
    expected = -(x * out.log() + (1 - x) * (1 - out).log()).sum(1)
    torch.testing.assert_close(feddisk.nll(weights, mask, x), expected)


@pytest.mark.parametrize("kind", ["even", "random"])
@pytest.mark.parametrize(("dim", "hidden"), SIZES)
def test_sampling_is_the_definition_step_by_step(dim: int, hidden: int, kind: str) -> None:
    weights, mask = made(dim, hidden), mask_of(dim, hidden, kind)
    uniforms = torch.rand(40, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    x = torch.full_like(uniforms, 0.3)  # entries that are not drawn yet must not matter
    for d in range(dim):
        x[:, d] = (uniforms[:, d] < feddisk.logits(weights, mask, x).sigmoid()[:, d]).double()
    assert torch.equal(feddisk.sample(weights, mask, uniforms), x)


def test_samples_have_the_density() -> None:
    dim, n = 3, 40_000
    weights, mask = made(dim, 12), feddisk.masks(dim, 12)
    x = feddisk.sample(
        weights,
        mask,
        torch.rand(n, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(4)),
    )
    seen = (
        torch.bincount((x @ torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64)).long(), minlength=8)
        / n
    )
    p = (-feddisk.nll(weights, mask, cube(dim))).exp()
    assert p.max() / p.min() > 3
    assert ((seen - p).abs() < 5 * (p * (1 - p) / n).sqrt()).all()


@pytest.mark.parametrize("value", [-0.01, 1.01, math.nan, math.inf])
def test_pixels_outside_the_unit_interval_are_refused(value: float) -> None:
    x = torch.rand(3, 4)
    feddisk.check_pixels(x)
    x[1, 2] = value
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        feddisk.check_pixels(x)


# ---- weights


def draw_p(seed: int, n: int = 30) -> Tensor:
    return torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", range(4))
def test_weights_read_literally(seed: int) -> None:
    p, n_local, n_global, lo, hi = draw_p(seed), 20, 35, 0.3, 4.0
    r = [float(q) / (1 - float(q)) * n_local / n_global for q in p]
    found = feddisk.density_ratio(p, n_local, n_global, 1e-6)
    np.testing.assert_allclose(found, r, rtol=1e-12)
    clipped = [min(max(each, lo), hi) for each in r]
    mean, low, high = sum(clipped) / len(clipped), min(clipped), max(clipped)
    for normalise, expected in [
        ("mean1", [c / mean for c in clipped]),
        ("none", clipped),
        ("minmax2", [2 * (c - low) / (high - low) for c in clipped]),
    ]:
        np.testing.assert_allclose(
            feddisk.sample_weights(found, lo, hi, normalise), expected, rtol=1e-12, atol=1e-15
        )
    assert low == lo and high == hi  # the clip was at work


@pytest.mark.parametrize("seed", range(4))
def test_weights_have_mean_one_and_a_bounded_range(seed: int) -> None:
    lo, hi = 0.1, 10.0
    r = feddisk.density_ratio(draw_p(seed), 1, 1, 1e-6)
    w = feddisk.sample_weights(r, lo, hi, "mean1")
    assert float(w.mean()) == pytest.approx(1, rel=1e-12)
    assert float(w.max() / w.min()) <= hi / lo * (1 + 1e-12)
    assert (
        (w.argsort() == draw_p(seed).argsort()).all() or float(r.max()) > hi or float(r.min()) < lo
    )
    assert 1 <= feddisk.effective_size(w) <= len(w)


@pytest.mark.parametrize("p", [0.0, 0.2, 0.5, 1.0])
def test_a_constant_probability_gives_ones(p: float) -> None:
    r = feddisk.density_ratio(torch.full((9,), p), 3, 4, 1e-6)
    for normalise in ("mean1", "minmax2"):
        assert torch.equal(
            feddisk.sample_weights(r, 0.1, 10.0, normalise), torch.ones(9, dtype=torch.float64)
        )


def test_effective_size() -> None:
    assert feddisk.effective_size(torch.full((8,), 3.0)) == pytest.approx(8)
    assert feddisk.effective_size(torch.tensor([0.0, 5.0, 0.0])) == pytest.approx(1)


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0)])
def test_empty_pseudo_classes_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"{sizes[0]} local and {sizes[1]} global"):
        feddisk.density_ratio(torch.tensor([0.5]), *sizes, 1e-6)


def test_no_probability_is_refused() -> None:
    with pytest.raises(ValueError, match="n >= 1"):
        feddisk.density_ratio(torch.empty(0), 1, 1, 1e-6)


# ---- communication


@pytest.mark.parametrize(
    ("made", "clf", "rounds", "other", "costs"),
    [
        (102_000, 39_000, (80, 100), 440, (24.1e6, 34.3e6)),
        (614_000, 447_000, (15, 105), 1015, (112e6, 907e6)),
        (47_000, 12_000, (70, 85), 500, (8.6e6, 12.0e6)),
    ],
    ids=["x-ray", "femnist", "mnist"],
)
def test_the_costs_of_the_paper(
    made: int, clf: int, rounds: tuple[int, int], other: int, costs: tuple[float, float]
) -> None:
    """Tables 1 and 2 into equations 18 and 19 give what Figure 6 and the text say."""
    first, second = rounds
    assert feddisk.comm_cost(clf, second, made, first) == pytest.approx(costs[0], rel=5e-3)
    assert feddisk.comm_cost(clf, other) == pytest.approx(costs[1], rel=5e-3)


def test_effective_rounds() -> None:
    accuracy = torch.tensor([0.1, 0.5, 0.4, 0.7, 0.7, 0.6])
    assert feddisk.effective_rounds(accuracy) == 4
    assert feddisk.effective_rounds(accuracy, 0.45) == 2
    assert feddisk.effective_rounds(accuracy, 0.71) is None


@pytest.mark.parametrize(
    "accuracy", [torch.empty(0), torch.tensor([0.5, math.nan]), torch.ones(2, 2)]
)
def test_accuracies_that_are_none_are_refused(accuracy: Tensor) -> None:
    with pytest.raises(ValueError, match="accuracies of shape"):
        feddisk.effective_rounds(accuracy)


def test_negative_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        feddisk.comm_cost(3, -1)


# ---- training


def test_early_stopping_counts_what_does_not_beat_the_best() -> None:
    stop = EarlyStopping(patience=2, tolerance=0.1)
    told = [stop(loss) for loss in (1.0, 0.95, 0.8, 0.75, 0.71)]
    assert told == [False, False, False, False, True]
    assert (stop.best, stop.stale) == (0.8, 2)


def test_a_loss_that_is_not_finite_is_told() -> None:
    w = torch.ones(1, requires_grad=True)
    epochs = density.descend(
        "thing",
        lambda at: w * torch.tensor(math.nan),
        [w],
        3,
        LocalSettings(lr=0.1),
        torch.Generator(),
    )
    with pytest.raises(ValueError, match="loss of the thing is nan"):
        next(epochs)


@pytest.mark.parametrize("patience", [3, 1000])
def test_the_local_made_is_the_epoch_that_was_best_on_the_held_out_part(patience: int) -> None:
    """The same epochs again, all of them: what is returned is the best of those up to the first
    that `patience` did not beat."""
    g = torch.Generator().manual_seed(0)
    left, flips = (
        torch.rand(40, 4, generator=g).round(),
        (torch.rand(40, 4, generator=g) < 0.2).float(),
    )
    data = torch.cat([left, (left - flips).abs()], 1)  # the right half is a noisy copy of the left
    x, held, mask = data[:20], data[20:], feddisk.masks(8, 20)
    settings = LocalSettings(lr=0.02, epochs=120, batch_size=4, optimizer="adam")

    def fresh() -> Tree:
        return {
            name: t.requires_grad_()
            for name, t in feddisk.initial(8, 20, torch.Generator().manual_seed(1)).items()
        }

    found = density.fit_made(
        fresh(), mask, x, held, settings, patience, torch.Generator().manual_seed(2)
    )
    again, losses, states = fresh(), [], []
    for _ in density.made_epochs("x", again, mask, x, settings, torch.Generator().manual_seed(2)):
        losses.append(density.mean_nll(again, mask, held))
        states.append({name: t.detach().clone() for name, t in again.items()})
    best = next(
        i
        for i in range(120)
        if losses[i] < min([*losses[:i], math.inf])
        and losses[i] <= min(losses[i : i + 1 + patience])
    )
    assert 0 < best < 116 and losses[-1] > losses[best]  # the case is one of over-fitting
    assert all(torch.equal(found[name], states[best][name]) for name in found)


def test_the_classifier_estimates_a_density_ratio() -> None:
    """Two overlapping groups on a line: p / (1 - p) is near the true ratio of 4 and 1/4."""
    zeros = torch.tensor([[0.0]] * 80 + [[1.0]] * 20)
    ones = torch.tensor([[0.0]] * 20 + [[1.0]] * 80)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        p = density.classify(
            zeros,
            ones,
            torch.tensor([[0.0], [1.0]]),
            50,
            LocalSettings(lr=0.05, epochs=100, batch_size=32),
            EarlyStopping(10, 1e-4),
            torch.Generator().manual_seed(0),
        )
    np.testing.assert_allclose(p, [0.2, 0.8], atol=0.05)
