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

from fedhet.core import trees

TARGETS = ("client_max", "global_max")
_TINY = torch.finfo(torch.float64).tiny


class Mixture(NamedTuple):
    """The weights pi (k,) with sum 1, the means mu (k, d), and the variances var (k, d) > 0."""

    pi: Tensor
    mu: Tensor
    var: Tensor


def components(n: int, most: int, least: int = 2) -> int:
    """Return the number of components for n samples, min(most, max(1, n // max(2, least))).

    With as many components as samples, each component would be a training image.

    Args:
        n: the number of samples.
        most: the largest number of components.
        least: the smallest number of samples behind a component, on average.
    """
    return min(most, max(1, n // max(2, least)))


def fit(x: Tensor, k: int, *, reg_covar: float, seed: int) -> tuple[Mixture, bool]:
    """Fit a mixture of k components to x (n, d) by EM.

    EM is scikit-learn's. It starts from k-means, and takes at most 100 iterations. After every
    M-step, the mixture has the mean of the samples, and the variance of the samples plus reg_covar.
    This is true even if EM has not converged.

    Args:
        x: (n, d) the samples.
        k: the number of components, <= n.
        reg_covar: is added to every variance.
        seed: the seed of k-means.

    Returns:
        The mixture in float64, and whether EM has converged.
    """
    x = x.double().cpu()
    if k == 1:  # EM's fixed point in closed form; scikit-learn does not accept a single sample
        mean = x.mean(0, keepdim=True)
        var = x.var(0, correction=0, keepdim=True) + reg_covar
        return Mixture(torch.ones(1, dtype=x.dtype), mean, var), True
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture

    em = GaussianMixture(k, covariance_type="diag", reg_covar=reg_covar, random_state=seed % 2**32)
    # EM's last bits depend on the number of BLAS and OpenMP threads. The limit that fedhet sets at
    # start-up does not cover libraries that are imported this late.
    with threadpool_limits(limits=1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the caller gets `converged_`
        em.fit(x.numpy())
    mixture = Mixture(*(torch.from_numpy(a) for a in (em.weights_, em.means_, em.covariances_)))
    return mixture, bool(em.converged_)


def check_mixture(mixture: Mixture, d: int) -> None:
    """Check that a mixture of `d` pixels is valid.

    Raises:
        ValueError: shapes do not match, a value is not finite, pi is negative or does not sum to 1
            within 1e-6, or a variance is not positive.
    """
    pi, mu, var = mixture
    if not (len(pi), d) == mu.shape == var.shape:
        raise ValueError(
            f"mu {tuple(mu.shape)}, var {tuple(var.shape)}; {(len(pi), d)} is expected of both"
        )
    if bad := trees.first_nonfinite(mixture._asdict()):
        raise ValueError(f"{bad} holds NaN or infinite values; all must be finite")
    total = float(pi.double().sum())
    if float(pi.min()) < 0 or abs(total - 1) > 1e-6:
        raise ValueError(
            f"the weights {pi.tolist()} have the sum {total};"
            " they must be >= 0 and sum to 1 within 1e-6"
        )
    if float(var.min()) <= 0:
        raise ValueError(f"the smallest variance is {float(var.min())}; all must be > 0")


def aggregate(counts: Sequence[int], mixtures: Sequence[Mixture | None]) -> Mixture | None:
    """Concatenate the mixtures in the given order, in float64.

    The weights are n_i pi_ik / sum_i n_i, so the result is the density of the pooled samples.

    Args:
        counts: n_i, the number of samples behind each mixture.
        mixtures: one per client. A client without samples or without a mixture contributes nothing.

    Returns:
        The mixture, or None if no client contributes.
    """
    parts = [(n, *m) for n, m in zip(counts, mixtures, strict=True) if n and m is not None]
    if not parts:
        return None
    n, pi, mu, var = zip(*parts, strict=True)
    weights = torch.cat([own.double() * count for own, count in zip(pi, n, strict=True)]) / sum(n)
    return Mixture(weights, torch.cat(mu).double(), torch.cat(var).double())


def reduce(mixture: Mixture, most: int, least: float = 0.0) -> Mixture:
    """Reduce the mixture to at most `most` components by merging the closest pairs, in float64.

    Then merge the component of least weight with the component closest to it, until every weight is
    at least `least` or a single component remains.

    Merging preserves the mean and the variance of the whole mixture. The closest pair has the
    smallest increase of Runnalls' bound on the Kullback-Leibler divergence (2007, eq. 16),

        ((pi_i + pi_j) log|V_ij| - pi_i log|V_i| - pi_j log|V_j|) / 2.

    Here V_ij is the variance of the merged pair.
    """
    pi, mu, var = (t.double().clone() for t in mixture)
    k = len(pi)
    alive = torch.ones(k, dtype=torch.bool)

    def merge(i: int, j: int) -> None:
        """Replace component i by its merger with component j, and remove component j."""
        pairs = merged_with(i)
        pi[i], mu[i], var[i] = pairs.pi[j], pairs.mu[j], pairs.var[j]
        alive[j] = False

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
        merge(i, j)
        cost[j] = cost[:, j] = torch.inf
        cost[i] = cost[:, i] = costs_of(i)
    while alive.sum() > 1 and float(pi[alive].min()) < least:
        i = int(pi.masked_fill(~alive, torch.inf).argmin())
        merge(i, int(costs_of(i).argmin()))
    return Mixture(pi[alive], mu[alive], var[alive])


def generate_counts(
    counts: Tensor, available: Tensor, target: str | int, global_max: int
) -> Tensor:
    """Return how many samples of each class to generate to reach the target, (..., C).

    A class above the target keeps all its real samples.

    Args:
        counts: (..., C) the client's own numbers of samples by class, integers.
        available: (C,) whether the class has a mixture.
        target: "client_max" (the client's largest class), "global_max" (the largest class of any
            client), or a number.
        global_max: the size of the largest class of any client.
    """
    largest = {"client_max": counts.amax(-1, keepdim=True), "global_max": global_max}
    return (largest.get(target, target) - counts).clamp_min(0) * available  # type: ignore[arg-type,operator]


def sample(mixture: Mixture, n: int, draws: np.random.Generator) -> Tensor:
    """Return n samples, clipped to [0, 1], shape (n, d), float32.

    The numbers of samples by component are multinomial. The samples are ordered by component.
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
