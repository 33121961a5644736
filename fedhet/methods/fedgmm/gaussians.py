"""FedGMM (Nagaraju, Sen and Mohan, section 4): diagonal Gaussian mixtures of one class.

The paper gives no equations for its mixtures; __init__.py describes the choices made here.
Shapes: k components, d pixels, n samples.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from fedhet.core.check import counted

TARGETS = ("client_max", "global_max")
_TINY = torch.finfo(torch.float64).tiny


class Mixture(NamedTuple):
    """The weights pi (k,) of sum 1, the means mu (k, d), and the variances var (k, d) > 0."""

    pi: Tensor
    mu: Tensor
    var: Tensor


class Fit(NamedTuple):
    """A mixture in float64, and whether EM converged."""

    mixture: Mixture
    converged: bool


def components(n: int, most: int, least: int = 2) -> int:
    """Return the number of components for n samples, min(most, max(1, n // max(2, least))).

    With k = n, each component would be a training image.

    Args:
        n: the number of samples.
        most: the largest number of components.
        least: the smallest number of samples behind a component, on average.
    """
    return min(most, max(1, n // max(2, least)))


def fit(x: Tensor, k: int, *, reg_covar: float, seed: int) -> Fit:
    """Fit a mixture of k components to x (n, d) by EM.

    EM is scikit-learn's, started by k-means, with at most 100 iterations. After every M-step, and
    so whether or not EM has converged, the mixture's mean is that of the samples, and its variance
    is theirs plus reg_covar.

    Args:
        x: (n, d) the samples.
        k: the number of components, <= n.
        reg_covar: is added to every variance.
        seed: the seed of the start by k-means.
    """
    x = x.double().cpu()
    if k == 1:  # EM's fixed point in closed form; scikit-learn does not accept a single sample
        mean = x.mean(0, keepdim=True)
        var = x.var(0, correction=0, keepdim=True) + reg_covar
        return Fit(Mixture(torch.ones(1, dtype=x.dtype), mean, var), True)
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture

    em = GaussianMixture(k, covariance_type="diag", reg_covar=reg_covar, random_state=seed % 2**32)
    # EM's last bits depend on the number of BLAS and OpenMP threads. Libraries that are imported
    # this late are not covered by the limit that was set at start-up.
    with threadpool_limits(limits=1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # reported by `converged`
        em.fit(x.numpy())
    mixture = Mixture(*(torch.from_numpy(a) for a in (em.weights_, em.means_, em.covariances_)))
    return Fit(mixture, bool(em.converged_))


def check_mixture(mixture: Mixture, d: int | None = None) -> None:
    """Check that a mixture is valid, and that it has `d` pixels if `d` is given.

    Raises:
        ValueError: shapes do not match, a value is not finite, pi is negative or does not sum to 1
            within 1e-6, or a variance is not positive.
    """
    pi, mu, var = mixture
    if pi.ndim != 1 or not len(pi) or mu.ndim != 2 or len(mu) != len(pi) or var.shape != mu.shape:
        raise ValueError(
            f"pi {tuple(pi.shape)}, mu {tuple(mu.shape)}, var {tuple(var.shape)};"
            " expected (k,), (k, d), (k, d) with k >= 1"
        )
    if d is not None and mu.shape[1] != d:
        raise ValueError(f"the components have {counted(mu.shape[1], 'dimension')}; expected: {d}")
    for name, values in mixture._asdict().items():
        if not torch.isfinite(values).all():
            raise ValueError(f"{name} holds NaN or infinite values; all must be finite")
    total = float(pi.double().sum())
    if float(pi.min()) < 0 or abs(total - 1) > 1e-6:
        raise ValueError(
            f"the weights {pi.tolist()} have the sum {total};"
            " they must be >= 0 and sum to 1 within 1e-6"
        )
    if float(var.min()) <= 0:
        raise ValueError(f"the smallest variance is {float(var.min())}; all must be > 0")


def aggregate(counts: Sequence[int], mixtures: Sequence[Mixture | None]) -> Mixture | None:
    """Return the mixtures' concatenation in the order given, in float64.

    The weights are n_i pi_ik / sum_i n_i, so that the result is the density of the pooled samples.

    Args:
        counts: n_i, the number of samples behind each mixture.
        mixtures: one per client. A client without samples or without a mixture contributes nothing.

    Returns:
        The mixture, or None if no client contributes.

    Raises:
        ValueError: a count or a mixture is invalid, or the mixtures differ in d. The message gives
            the position.
    """
    if len(counts) != len(mixtures) or any(n < 0 or n % 1 for n in counts):
        raise ValueError(
            f"counts {list(counts)} of {len(mixtures)} mixtures; expected one integer >= 0 each"
        )
    numbered = enumerate(zip(counts, mixtures, strict=True))
    parts = [(i, n, mixture) for i, (n, mixture) in numbered if n and mixture is not None]
    if not parts:
        return None
    d = parts[0][2].mu.shape[-1]
    for i, _, mixture in parts:
        try:
            check_mixture(mixture, d)
        except ValueError as error:
            raise ValueError(f"mixture {i}: {error}") from error
    total = sum(n for _, n, _ in parts)
    return Mixture(
        torch.cat([mixture.pi.double() * n for _, n, mixture in parts]) / total,
        torch.cat([mixture.mu.double() for *_, mixture in parts]),
        torch.cat([mixture.var.double() for *_, mixture in parts]),
    )


def moments(mixture: Mixture) -> tuple[Tensor, Tensor]:
    """Return the mean (d,) and the variance (d,) of the mixture, in float64."""
    pi, mu, var = (t.double() for t in mixture)
    mean = pi @ mu
    return mean, pi @ (var + (mu - mean) ** 2)


def reduce(mixture: Mixture, most: int, least: float = 0.0) -> Mixture:
    """Reduce the mixture to at most `most` components by merging the closest pairs, in float64.

    Then the lightest component is merged with the one closest to it, until one is left or all have
    a weight of at least `least`.

    The mean and the variance of the whole mixture are preserved. The closest pair is the one with
    the least increase of Runnalls' bound on the Kullback-Leibler divergence (2007, eq. 16),

        ((pi_i + pi_j) log|V_ij| - pi_i log|V_i| - pi_j log|V_j|) / 2,

    where V_ij is the variance of the merged pair.
    """
    pi, mu, var = (t.double().clone() for t in mixture)
    k = len(pi)
    alive = torch.ones(k, dtype=torch.bool)

    def merged_with(i: int) -> Mixture:
        """Return component i merged with each of the k components."""
        weight = pi + pi[i]
        share = (pi / weight.clamp_min(_TINY))[:, None]
        return Mixture(
            weight,
            mu[i] + share * (mu - mu[i]),
            share * var + (1 - share) * var[i] + share * (1 - share) * (mu - mu[i]) ** 2,
        )

    def costs_of(i: int) -> Tensor:
        """Return the increase of the bound for each partner of component i, (k,)."""
        size = pi * var.log().sum(1)
        pairs = merged_with(i)
        cost = (pairs.pi * pairs.var.log().sum(1) - size - size[i]) / 2
        return cost.masked_fill(~alive | (torch.arange(k) == i), torch.inf)

    if k > most:
        cost = torch.stack([costs_of(i) for i in range(k)])
    for _ in range(k - most):
        i, j = sorted(divmod(int(cost.argmin()), k))
        pairs = merged_with(i)
        pi[i], mu[i], var[i] = pairs.pi[j], pairs.mu[j], pairs.var[j]
        alive[j] = False
        cost[j] = cost[:, j] = torch.inf
        cost[i] = cost[:, i] = costs_of(i)
    while alive.sum() > 1 and float(pi[alive].min()) < least:
        i = int(pi.masked_fill(~alive, torch.inf).argmin())
        j = int(costs_of(i).argmin())
        pairs = merged_with(i)
        pi[i], mu[i], var[i] = pairs.pi[j], pairs.mu[j], pairs.var[j]
        alive[j] = False
    return Mixture(pi[alive], mu[alive], var[alive])


def generate_counts(
    counts: Tensor, available: Tensor, target: str | int, global_max: int
) -> Tensor:
    """Return how many samples to generate of each class so that it reaches the target, (..., C).

    Real samples are never discarded.

    Args:
        counts: (..., C) the client's own numbers of samples by class, integers.
        available: (C,) whether the class has a mixture.
        target: "client_max" (the client's largest class), "global_max" (the largest class of any
            client), or a number.
        global_max: the size of the largest class of any client.

    Raises:
        ValueError: a count is negative or not an integer, or the target is none of these.
    """
    if counts.is_floating_point() or (counts < 0).any():
        raise ValueError(f"counts {counts.tolist()}; expected integers >= 0")
    goal: Tensor | int
    if target == "client_max":
        goal = counts.amax(-1, keepdim=True)
    else:
        goal = global_max if target == "global_max" else target  # type: ignore[assignment]
        if isinstance(goal, bool) or not isinstance(goal, int) or goal < 0:
            raise ValueError(
                f"target={target!r} with global_max={global_max!r};"
                f" choose {' or '.join(TARGETS)}, or give an integer >= 0"
            )
    return (goal - counts).clamp_min(0) * available.to(counts.dtype)


def sample(mixture: Mixture, n: int, draws: np.random.Generator) -> Tensor:
    """Return n samples, clipped to [0, 1], shape (n, d), float32.

    The number of samples of each component is multinomial; the components follow one another.
    """
    pi = mixture.pi.double().numpy()
    out = np.empty((n, mixture.mu.shape[1]), dtype=np.float32)
    start = 0
    for k, size in enumerate(draws.multinomial(n, pi / pi.sum())):
        mu = mixture.mu[k].numpy()
        std = mixture.var[k].sqrt().numpy()
        noise = draws.standard_normal((size, len(mu)), dtype=np.float32)
        out[start : start + size] = mu + std * noise
        start += size
    return torch.from_numpy(out).clamp_(0, 1)
