"""FedGMM's mixtures: exact pooled moments whatever EM found, densities against scikit-learn, counts
in balance."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from sklearn.mixture import GaussianMixture
from torch import Tensor

from fedhet.maths import fedgmm as maths
from fedhet.maths.fedgmm import Mixture

REG = 1e-6


def clusters(n: int, d: int, seed: int) -> Tensor:
    """Pixels in [0, 1] around a few centres."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(
        np.clip(
            rng.uniform(0, 1, (4, d))[rng.integers(0, 4, n)] + 0.1 * rng.normal(size=(n, d)), 0, 1
        )
    )


def draw(k: int, d: int, seed: int) -> Mixture:
    rng = np.random.default_rng(seed)
    return Mixture(
        *(
            torch.from_numpy(a)
            for a in (
                rng.dirichlet(np.ones(k)),
                rng.uniform(0, 1, (k, d)),
                rng.uniform(0.01, 0.2, (k, d)),
            )
        )
    )


def reference(mixture: Mixture) -> GaussianMixture:
    """The same mixture as an object of scikit-learn."""
    em = GaussianMixture(len(mixture.pi), covariance_type="diag")
    em.weights_, em.means_, em.covariances_ = (t.double().numpy() for t in mixture)
    em.precisions_cholesky_ = 1 / np.sqrt(em.covariances_)
    return em


@pytest.mark.parametrize("most", [None, 7, 2, 1])
@pytest.mark.parametrize("seed", range(4))
def test_the_aggregate_has_the_pooled_moments(seed: int, most: int | None) -> None:
    """Mean and variance + reg_covar of all samples together, whatever optimum EM found, merged or
    not."""
    parts = [clusters(n, 6, 10 * seed + n) for n in (2, 9, 40, 25)]
    fits = [
        maths.fit(x, maths.components(len(x), 5), reg_covar=REG, seed=seed).mixture for x in parts
    ]
    assert [len(f.pi) for f in fits] == [1, 4, 5, 5]
    found = maths.aggregate([len(x) for x in parts], fits)
    assert found is not None
    if most is not None:
        found = maths.reduce(found, most)
    assert len(found.pi) == (most or 15)
    mean, variance = maths.moments(found)
    pooled = torch.cat(parts).numpy()
    np.testing.assert_allclose(mean, pooled.mean(0), rtol=1e-12)
    np.testing.assert_allclose(variance, pooled.var(0) + REG, rtol=1e-11)
    assert float(found.pi.sum()) == pytest.approx(1, abs=1e-12)


def test_em_that_has_not_converged_says_so_and_keeps_the_moments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = clusters(60, 6, 3)
    assert maths.fit(x, 5, reg_covar=REG, seed=0).converged
    monkeypatch.setattr("sklearn.mixture.GaussianMixture", partial(GaussianMixture, max_iter=1))
    found = maths.fit(x, 5, reg_covar=REG, seed=0)
    assert not found.converged
    mean, variance = maths.moments(found.mixture)
    np.testing.assert_allclose(mean, x.mean(0), rtol=1e-12)
    np.testing.assert_allclose(variance, x.var(0, correction=0) + REG, rtol=1e-11)


def test_em_raises_the_likelihood_of_the_samples() -> None:
    x = clusters(80, 6, 5)
    one, five = (
        float(maths.log_density(maths.fit(x, k, reg_covar=REG, seed=0).mixture, x).mean())
        for k in (1, 5)
    )
    assert five > one + 1


@pytest.mark.parametrize("n", [1, 3, 12])
def test_constant_pixels_get_the_variance_floor(n: int) -> None:
    found = maths.fit(
        torch.full((n, 3), 0.25), maths.components(n, 5), reg_covar=1e-3, seed=0
    ).mixture
    maths.check(found, 3)
    mean, variance = maths.moments(found)
    np.testing.assert_allclose(mean, 0.25, rtol=1e-9)
    np.testing.assert_allclose(variance, 1e-3, rtol=1e-9)


def test_a_seed_repeats_em_and_another_does_not() -> None:
    x = clusters(60, 6, 1)
    first, again, other = (
        maths.fit(x, 5, reg_covar=REG, seed=seed).mixture for seed in (2**40 + 1, 2**40 + 1, 9)
    )
    assert torch.equal(first.mu, again.mu) and not torch.equal(first.mu, other.mu)


@pytest.mark.parametrize(
    ("n", "most", "expected"),
    [
        (1, 5, 1),
        (2, 5, 1),
        (3, 5, 1),
        (4, 5, 2),
        (9, 5, 4),
        (10, 5, 5),
        (99, 5, 5),
        (9, 1, 1),
    ],
)
def test_components(n: int, most: int, expected: int) -> None:
    assert maths.components(n, most) == expected


def test_the_density_is_scikit_learns() -> None:
    mixture, x = draw(5, 4, 0), torch.rand(50, 4, dtype=torch.float64)
    np.testing.assert_allclose(
        maths.log_density(mixture, x), reference(mixture).score_samples(x.numpy()), rtol=1e-12
    )


def test_the_aggregate_is_the_pooled_density() -> None:
    """sum_i n_i p_i / sum n, with scikit-learn's p_i; a client without samples or mixture counts
    for nothing."""
    mixtures, counts = (
        [draw(3, 4, 1), None, draw(1, 4, 2), draw(5, 4, 3), draw(2, 4, 4)],
        [
            20,
            9,
            30,
            0,
            50,
        ],
    )
    found = maths.aggregate(counts, mixtures)
    x = np.random.default_rng(0).uniform(0, 1, (40, 4))
    expected = (
        sum(
            n * np.exp(reference(m).score_samples(x))
            for n, m in zip(counts, mixtures, strict=True)
            if m and n
        )
        / 100
    )
    assert found is not None and len(found.pi) == 6
    np.testing.assert_allclose(
        maths.log_density(found, torch.from_numpy(x)), np.log(expected), rtol=1e-11
    )


def test_order_and_scale_of_the_counts_do_not_change_the_density() -> None:
    mixtures, counts = [draw(3, 4, 1), draw(1, 4, 2), draw(5, 4, 3)], [20, 30, 50]
    found, scaled = (
        maths.aggregate(counts, mixtures),
        maths.aggregate([7 * n for n in counts], mixtures),
    )
    turned = maths.aggregate(counts[::-1], mixtures[::-1])
    assert found is not None and scaled is not None and turned is not None
    torch.testing.assert_close(scaled.pi, found.pi, rtol=1e-14, atol=0)
    assert torch.equal(turned.mu, torch.cat([m.mu for m in mixtures[::-1]]))
    x = torch.rand(20, 4, dtype=torch.float64)
    torch.testing.assert_close(
        maths.log_density(turned, x), maths.log_density(found, x), rtol=1e-12, atol=0
    )


def test_nobody_has_the_class() -> None:
    assert maths.aggregate([0, 4], [draw(2, 3, 0), None]) is None


def test_the_closest_pair_is_merged_by_its_moments() -> None:
    """Of three points, the two near ones: weight .2 + .6, mean 1/4 .1 + 3/4 .2, variance 1/4 .01 +
    3/4 .02 + 3/16 .1^2."""
    mixture = Mixture(
        torch.tensor([0.2, 0.2, 0.6]),
        torch.tensor([[0.1], [0.9], [0.2]]),
        torch.tensor([[0.01], [0.01], [0.02]]),
    )
    found = maths.reduce(mixture, 2)
    np.testing.assert_allclose(found.pi, [0.8, 0.2], rtol=1e-6)
    np.testing.assert_allclose(found.mu[:, 0], [0.175, 0.9], rtol=1e-6)
    np.testing.assert_allclose(found.var[:, 0], [0.019375, 0.01], rtol=1e-6)
    for most in (3, 4):
        assert all(
            torch.equal(a, b.double())
            for a, b in zip(maths.reduce(mixture, most), mixture, strict=True)
        )


def test_every_merge_is_the_cheapest() -> None:
    """Against all pairs, each tried on its own."""
    mixture = draw(7, 3, 6)

    def cost(i: int, j: int) -> float:
        a, b = float(mixture.pi[i]), float(mixture.pi[j])
        va, vb = mixture.var[i].numpy(), mixture.var[j].numpy()
        gap = (mixture.mu[i] - mixture.mu[j]).numpy()
        v = (a * va + b * vb) / (a + b) + a * b / (a + b) ** 2 * gap**2
        return ((a + b) * np.log(v).sum() - a * np.log(va).sum() - b * np.log(vb).sum()) / 2

    i, j = min(((i, j) for i in range(7) for j in range(i)), key=lambda pair: cost(*pair))
    kept = [k for k in range(7) if k not in (i, j)]
    found = maths.reduce(mixture, 6)
    assert {float(p) for p in mixture.pi[kept]} <= {float(p) for p in found.pi}


def test_identical_components_merge_into_one_of_them() -> None:
    mixture = Mixture(
        torch.tensor([0.25, 0.25, 0.5, 0.0]), torch.full((4, 2), 0.4), torch.full((4, 2), 0.1)
    )
    found = maths.reduce(mixture, 1)
    np.testing.assert_allclose(
        torch.cat([t.flatten() for t in found]), [1, 0.4, 0.4, 0.1, 0.1], rtol=1e-6
    )


def test_samples_follow_the_mixture() -> None:
    """Moments within five standard errors, the components' shares within five of the
    multinomial."""
    mixture = Mixture(
        torch.tensor([0.3, 0.7]),
        torch.tensor([[0.3, 0.5], [0.7, 0.4]]),
        torch.tensor([[1e-3, 4e-3], [2e-3, 1e-3]]),
    )
    n = 40_000
    found = maths.sample(mixture, n, np.random.default_rng(0)).double()
    mean, variance = maths.moments(mixture)
    assert found.shape == (n, 2)
    assert ((found.mean(0) - mean).abs() < 5 * (variance / n).sqrt()).all()
    torch.testing.assert_close(found.var(0), variance, rtol=0.05, atol=0)
    first = int((found[:, 0] < 0.5).sum())
    assert first != 0.3 * n and abs(first - 0.3 * n) < 5 * (n * 0.21) ** 0.5
    np.testing.assert_allclose(found[:first].var(0), [1e-3, 4e-3], rtol=0.1)


def test_samples_are_clipped_and_repeat_with_the_stream() -> None:
    wide = Mixture(torch.ones(1), torch.tensor([[0.0, 1.0]]), torch.ones(1, 2))
    found, again = (maths.sample(wide, 400, np.random.default_rng(3)) for _ in range(2))
    assert torch.equal(found, again)
    assert (
        float(found.min()) == 0
        and float(found.max()) == 1
        and 0.4 < float((found == 0).double().mean(0)[0]) < 0.6
    )
    assert maths.sample(wide, 0, np.random.default_rng(3)).shape == (0, 2)


COUNTS = torch.tensor([[5, 0, 2, 9], [0, 0, 0, 0], [1, 1, 1, 1]])


def test_counts_after_generating_are_equal() -> None:
    everything = torch.ones(4, dtype=torch.bool)
    own = maths.generate_counts(COUNTS, everything, "client_max", 9) + COUNTS
    assert own.tolist() == [[9] * 4, [0] * 4, [1] * 4]
    assert (maths.generate_counts(COUNTS, everything, "global_max", 9) + COUNTS).tolist() == [
        [9] * 4
    ] * 3
    assert (maths.generate_counts(COUNTS, everything, 3, 9) + COUNTS).tolist() == [
        [5, 3, 3, 9],
        [3] * 4,
        [3] * 4,
    ]
    assert maths.generate_counts(COUNTS, everything, 0, 9).sum() == 0


def test_nothing_is_generated_without_a_mixture() -> None:
    found = maths.generate_counts(
        COUNTS[0], torch.tensor([True, False, True, False]), "client_max", 9
    )
    assert found.tolist() == [4, 0, 7, 0]


@pytest.mark.parametrize(
    ("counts", "target"),
    [
        ([3, -1], "client_max"),
        ([3.0, 1.0], "client_max"),
        ([3, 1], "max"),
        ([3, 1], -1),
        ([3, 1], True),
        ([3, 1], 2.5),
    ],
)
def test_bad_counts_are_named(counts: list[int], target: object) -> None:
    with pytest.raises(ValueError, match=r"counts \[|target="):
        maths.generate_counts(torch.tensor(counts), torch.ones(2, dtype=torch.bool), target, 3)  # type: ignore[arg-type]


def broken(**values: object) -> Mixture:
    good = Mixture(torch.tensor([0.5, 0.5]), torch.zeros(2, 3), torch.ones(2, 3))
    return good._replace(**{name: torch.tensor(value) for name, value in values.items()})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mixture", "said"),
    [
        (broken(var=[[1.0, 1, 1], [1, 0, 1]]), "smallest variance is 0.0"),
        (broken(var=[[1.0, 1, 1], [1, -2, 1]]), "smallest variance is -2.0"),
        (broken(pi=[0.5, 0.4]), "sum to 1 within 1e-6"),
        (broken(pi=[0.5, 0.500002]), "sum to 1 within 1e-6"),
        (broken(pi=[1.5, -0.5]), ">= 0"),
        (broken(pi=[float("nan"), 1.0]), "pi holds NaN"),
        (broken(mu=[[0.0, 0, float("nan")], [0, 0, 0]]), "mu holds NaN"),
        (broken(var=[[1.0, 1, float("inf")], [1, 1, 1]]), "var holds NaN or inf"),
        (broken(mu=[[0.0, 0], [0, 0]]), r"mu \(2, 2\), var \(2, 3\)"),
        (broken(mu=[[0.0, 0], [0, 0]], var=[[1.0, 1], [1, 1]]), "2 dimensions; 3 are expected"),
        (broken(pi=[1.0]), r"pi \(1,\)"),
    ],
)
def test_a_bad_mixture_is_named(mixture: Mixture, said: str) -> None:
    with pytest.raises(ValueError, match=rf"mixture 1: .*{said}"):
        maths.aggregate([3, 4], [broken(), mixture])


@pytest.mark.parametrize("counts", [[3, -4], [3, 1.5], [3], [3, float("inf")], [3, float("nan")]])
def test_bad_numbers_of_samples_are_named(counts: list[int]) -> None:
    with pytest.raises(ValueError, match=r"counts \[3"):
        maths.aggregate(counts, [broken(), broken()])
