"""FedGMM's mixtures: EM, densities, and their aggregation with exact pooled moments."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from maths.cases import named_case
from sklearn.mixture import GaussianMixture
from torch import Tensor

from fedhet.methods.fedgmm import gaussians as maths
from fedhet.methods.fedgmm.gaussians import Mixture

REG = 1e-6


def clusters(n: int, d: int, seed: int) -> Tensor:
    """Pixels in [0, 1] around four centres."""
    rng = np.random.default_rng(seed)
    centres = rng.uniform(0, 1, (4, d))[rng.integers(0, 4, n)]
    return torch.from_numpy(np.clip(centres + 0.1 * rng.normal(size=(n, d)), 0, 1))


def draw(k: int, d: int, seed: int) -> Mixture:
    rng = np.random.default_rng(seed)
    pi = rng.dirichlet(np.ones(k))
    mu = rng.uniform(0, 1, (k, d))
    var = rng.uniform(0.01, 0.2, (k, d))
    return Mixture(*(torch.from_numpy(a) for a in (pi, mu, var)))


def reference(mixture: Mixture) -> GaussianMixture:
    """The same mixture as an object of scikit-learn."""
    em = GaussianMixture(len(mixture.pi), covariance_type="diag")
    em.weights_, em.means_, em.covariances_ = (t.double().numpy() for t in mixture)
    em.precisions_cholesky_ = 1 / np.sqrt(em.covariances_)
    return em


# ---- fits


def test_em_that_has_not_converged_reports_it_and_keeps_the_moments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = clusters(60, 6, 3)
    assert maths.fit(x, 5, reg_covar=REG, seed=0).converged
    monkeypatch.setattr("sklearn.mixture.GaussianMixture", partial(GaussianMixture, max_iter=1))
    fit = maths.fit(x, 5, reg_covar=REG, seed=0)
    assert not fit.converged
    mean, variance = maths.moments(fit.mixture)
    np.testing.assert_allclose(mean, x.mean(0), rtol=1e-12)
    np.testing.assert_allclose(variance, x.var(0, correction=0) + REG, rtol=1e-11)


def test_em_raises_the_likelihood_of_the_samples() -> None:
    x = clusters(80, 6, 5)
    fits = [maths.fit(x, k, reg_covar=REG, seed=0).mixture for k in (1, 5)]
    one, five = (reference(mixture).score(x.numpy()) for mixture in fits)
    assert five > one + 1


def test_constant_pixels_get_the_variance_floor() -> None:
    for n in [1, 3, 12]:
        with named_case(n):
            k = maths.components(n, 5)
            mixture = maths.fit(torch.full((n, 3), 0.25), k, reg_covar=1e-3, seed=0).mixture
            maths.check_mixture(mixture, 3)
            mean, variance = maths.moments(mixture)
            np.testing.assert_allclose(mean, 0.25, rtol=1e-9)
            np.testing.assert_allclose(variance, 1e-3, rtol=1e-9)


def test_em_repeats_with_the_same_seed_and_not_with_another() -> None:
    x = clusters(60, 6, 1)
    seeds = (2**40 + 1, 2**40 + 1, 9)
    first, again, other = (maths.fit(x, 5, reg_covar=REG, seed=seed).mixture for seed in seeds)
    assert torch.equal(first.mu, again.mu) and not torch.equal(first.mu, other.mu)


def test_components() -> None:
    for n, most, expected in [
        (1, 5, 1),
        (2, 5, 1),
        (3, 5, 1),
        (4, 5, 2),
        (9, 5, 4),
        (10, 5, 5),
        (99, 5, 5),
        (9, 1, 1),
    ]:
        with named_case(n, most, expected):
            assert maths.components(n, most) == expected


# ---- aggregation


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))]
)
def test_the_aggregate_has_the_pooled_moments(seed: int) -> None:
    """The mean, and the variance + reg_covar, of all samples together.

    This holds whatever optimum EM finds, and with or without merging.
    """
    parts = [clusters(n, 6, 10 * seed + n) for n in (2, 9, 40, 25)]
    fits = [
        maths.fit(x, maths.components(len(x), 5), reg_covar=REG, seed=seed).mixture for x in parts
    ]
    assert [len(mixture.pi) for mixture in fits] == [1, 4, 5, 5]
    whole = maths.aggregate([len(x) for x in parts], fits)
    assert whole is not None
    pooled = torch.cat(parts).numpy()
    for most in (None, 7, 2, 1):
        with named_case(most):
            total = whole if most is None else maths.reduce(whole, most)
            assert len(total.pi) == (most or 15)
            mean, variance = maths.moments(total)
            np.testing.assert_allclose(mean, pooled.mean(0), rtol=1e-12)
            np.testing.assert_allclose(variance, pooled.var(0) + REG, rtol=1e-11)
            assert float(total.pi.sum()) == pytest.approx(1, abs=1e-12)


def test_the_aggregate_is_the_pooled_density() -> None:
    """sum_i n_i p_i / sum n, with scikit-learn's p_i.

    A client without samples or without a mixture contributes nothing.
    """
    mixtures = [draw(3, 4, 1), None, draw(1, 4, 2), draw(5, 4, 3), draw(2, 4, 4)]
    counts = [20, 9, 30, 0, 50]
    total = maths.aggregate(counts, mixtures)
    assert total is not None and len(total.pi) == 6
    x = np.random.default_rng(0).uniform(0, 1, (40, 4))
    densities = [
        n * np.exp(reference(mixture).score_samples(x))
        for n, mixture in zip(counts, mixtures, strict=True)
        if mixture and n
    ]
    actual = reference(total).score_samples(x)
    np.testing.assert_allclose(actual, np.log(sum(densities) / 100), rtol=1e-11)


def test_order_and_scale_of_the_counts_do_not_change_the_density() -> None:
    mixtures, counts = [draw(3, 4, 1), draw(1, 4, 2), draw(5, 4, 3)], [20, 30, 50]
    plain = maths.aggregate(counts, mixtures)
    scaled = maths.aggregate([7 * n for n in counts], mixtures)
    reversed_ = maths.aggregate(counts[::-1], mixtures[::-1])
    assert plain is not None and scaled is not None and reversed_ is not None
    torch.testing.assert_close(scaled.pi, plain.pi, rtol=1e-14, atol=0)
    assert torch.equal(reversed_.mu, torch.cat([mixture.mu for mixture in mixtures[::-1]]))
    x = np.random.default_rng(0).uniform(0, 1, (20, 4))
    densities = [reference(mixture).score_samples(x) for mixture in (reversed_, plain)]
    np.testing.assert_allclose(*densities, rtol=1e-12)


def test_a_class_that_no_client_has_gives_no_mixture() -> None:
    assert maths.aggregate([0, 4], [draw(2, 3, 0), None]) is None


def test_the_closest_pair_is_merged_by_its_moments() -> None:
    """Of three points, the two that are close.

    Their weight is .2 + .6, their mean 1/4 .1 + 3/4 .2, and their variance
    1/4 .01 + 3/4 .02 + 3/16 .1^2.
    """
    mixture = Mixture(
        torch.tensor([0.2, 0.2, 0.6]),
        torch.tensor([[0.1], [0.9], [0.2]]),
        torch.tensor([[0.01], [0.01], [0.02]]),
    )
    reduced = maths.reduce(mixture, 2)
    np.testing.assert_allclose(reduced.pi, [0.8, 0.2], rtol=1e-6)
    np.testing.assert_allclose(reduced.mu[:, 0], [0.175, 0.9], rtol=1e-6)
    np.testing.assert_allclose(reduced.var[:, 0], [0.019375, 0.01], rtol=1e-6)
    for most in (3, 4):
        pairs = zip(maths.reduce(mixture, most), mixture, strict=True)
        assert all(torch.equal(a, b.double()) for a, b in pairs)


def test_every_merge_is_the_cheapest() -> None:
    """Compared with all pairs, each merged separately."""
    mixture = draw(7, 3, 6)

    def cost(i: int, j: int) -> float:
        a, b = float(mixture.pi[i]), float(mixture.pi[j])
        va, vb = mixture.var[i].numpy(), mixture.var[j].numpy()
        gap = (mixture.mu[i] - mixture.mu[j]).numpy()
        v = (a * va + b * vb) / (a + b) + a * b / (a + b) ** 2 * gap**2
        return ((a + b) * np.log(v).sum() - a * np.log(va).sum() - b * np.log(vb).sum()) / 2

    i, j = min(((i, j) for i in range(7) for j in range(i)), key=lambda pair: cost(*pair))
    kept = [k for k in range(7) if k not in (i, j)]
    reduced = maths.reduce(mixture, 6)
    assert {float(p) for p in mixture.pi[kept]} <= {float(p) for p in reduced.pi}


def test_identical_components_merge_into_one_of_them() -> None:
    pi = torch.tensor([0.25, 0.25, 0.5, 0.0])
    mixture = Mixture(pi, torch.full((4, 2), 0.4), torch.full((4, 2), 0.1))
    values = torch.cat([t.flatten() for t in maths.reduce(mixture, 1)])
    np.testing.assert_allclose(values, [1, 0.4, 0.4, 0.1, 0.1], rtol=1e-6)


# ---- bad input


def broken(**values: object) -> Mixture:
    good = Mixture(torch.tensor([0.5, 0.5]), torch.zeros(2, 3), torch.ones(2, 3))
    return good._replace(**{name: torch.tensor(value) for name, value in values.items()})  # type: ignore[arg-type]


def test_a_bad_mixture_is_reported() -> None:
    cases = [
        (broken(var=[[1.0, 1, 1], [1, 0, 1]]), "smallest variance is 0.0"),
        (broken(var=[[1.0, 1, 1], [1, -2, 1]]), "smallest variance is -2.0"),
        (broken(pi=[0.5, 0.4]), "sum to 1 within 1e-6"),
        (broken(pi=[0.5, 0.500002]), "sum to 1 within 1e-6"),
        (broken(pi=[1.5, -0.5]), ">= 0"),
        (broken(pi=[float("nan"), 1.0]), "pi holds NaN"),
        (broken(mu=[[0.0, 0, float("nan")], [0, 0, 0]]), "mu holds NaN"),
        (broken(var=[[1.0, 1, float("inf")], [1, 1, 1]]), "var holds NaN or inf"),
        (broken(mu=[[0.0, 0], [0, 0]]), r"mu \(2, 2\), var \(2, 3\)"),
        (broken(mu=[[0.0, 0], [0, 0]], var=[[1.0, 1], [1, 1]]), "2 dimensions; expected: 3"),
        (broken(pi=[1.0]), r"pi \(1,\)"),
    ]
    for mixture, message in cases:
        with (
            named_case(mixture, message),
            pytest.raises(ValueError, match=rf"mixture 1: .*{message}"),
        ):
            maths.aggregate([3, 4], [broken(), mixture])


def test_bad_numbers_of_samples_are_reported() -> None:
    for counts in [[3, -4], [3, 1.5], [3], [3, float("inf")], [3, float("nan")]]:
        with named_case(counts), pytest.raises(ValueError, match=r"counts \[3"):
            maths.aggregate(counts, [broken(), broken()])
