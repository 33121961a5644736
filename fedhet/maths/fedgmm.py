"""FedGMM (Nagaraju, Sen, Mohan, section 4): diagonal Gaussian mixtures of one class. Shapes: k
components, d pixels."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

TARGETS = ("client_max", "global_max")
_TINY = torch.finfo(torch.float64).tiny


class Mixture(NamedTuple):
    """Weights pi (k,) with sum 1, means mu (k, d), diagonal variances var (k, d) > 0."""

    pi: Tensor
    mu: Tensor
    var: Tensor


class Fit(NamedTuple):
    """A mixture in float64 and whether EM converged."""

    mixture: Mixture
    converged: bool


def components(n: int, most: int) -> int:
    """How many components n samples get: min(most, max(1, n // 2)); with k = n each would be a
    training image."""
    return min(most, max(1, n // 2))


def fit(x: Tensor, k: int, *, reg_covar: float, seed: int) -> Fit:
    """EM by scikit-learn (k-means start, 100 iterations at most) on x (n, d); `reg_covar` is added
    to every variance.

    After any M-step the mixture's mean is the samples' mean and its variance theirs plus reg_covar,
    converged or not."""
    x = x.double().cpu()
    if k == 1:  # EM's fixed point, in closed form; scikit-learn refuses a single sample
        return Fit(
            Mixture(
                torch.ones(1, dtype=x.dtype),
                x.mean(0, keepdim=True),
                x.var(0, correction=0, keepdim=True) + reg_covar,
            ),
            True,
        )
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture

    em = GaussianMixture(k, covariance_type="diag", reg_covar=reg_covar, random_state=seed % 2**32)
    # The number of threads of BLAS and OpenMP changes EM's last bits, and what is imported late was
    # not pinned.
    with threadpool_limits(limits=1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # `converged` says it
        em.fit(x.numpy())
    return Fit(
        Mixture(*(torch.from_numpy(a) for a in (em.weights_, em.means_, em.covariances_))),
        bool(em.converged_),
    )


def check(mixture: Mixture, d: int | None = None) -> None:
    """ValueError unless pi >= 0 sums to 1 (1e-6), var > 0, everything is finite, and there are `d`
    pixels where that is given."""
    pi, mu, var = mixture
    if pi.ndim != 1 or not len(pi) or mu.ndim != 2 or len(mu) != len(pi) or var.shape != mu.shape:
        raise ValueError(
            f"pi {tuple(pi.shape)}, mu {tuple(mu.shape)}, var {tuple(var.shape)}; expected (k,),"
            " (k, d), (k, d) with k >= 1"
        )
    if d is not None and mu.shape[1] != d:
        raise ValueError(f"the components have {mu.shape[1]} dimensions; {d} are expected")
    for name, values in mixture._asdict().items():
        if not torch.isfinite(values).all():
            raise ValueError(f"{name} holds NaN or infinite values; all must be finite")
    if float(pi.min()) < 0 or abs(float(pi.double().sum()) - 1) > 1e-6:
        raise ValueError(
            f"the weights {pi.tolist()} have sum {float(pi.double().sum())}; they must be >= 0 and"
            " sum to 1 within 1e-6"
        )
    if float(var.min()) <= 0:
        raise ValueError(f"the smallest variance is {float(var.min())}; all must be > 0")


def aggregate(counts: Sequence[int], mixtures: Sequence[Mixture | None]) -> Mixture | None:
    """Concatenation in the order given, with weights n_i pi_ik / sum_i n_i: the density of the
    pooled samples, in float64.

    Args: counts: n_i, the samples behind each mixture. A client without samples or without a
        mixture contributes nothing.
    Returns:
        None where nobody contributes.
    Raises:
        ValueError: a count or mixture is out of range, or they differ in d; it names the position.
    """
    if len(counts) != len(mixtures) or any(n < 0 or n % 1 for n in counts):
        raise ValueError(
            f"counts {list(counts)} of {len(mixtures)} mixtures; one whole number >= 0 each is"
            " expected"
        )
    parts = [
        (i, n, m)
        for i, (n, m) in enumerate(zip(counts, mixtures, strict=True))
        if n and m is not None
    ]
    if not parts:
        return None
    d = parts[0][2].mu.shape[-1]
    for i, _, mixture in parts:
        try:
            check(mixture, d)
        except ValueError as error:
            raise ValueError(f"mixture {i}: {error}") from error
    total = sum(n for _, n, _ in parts)
    return Mixture(
        torch.cat([m.pi.double() * n for _, n, m in parts]) / total,
        *(torch.cat([getattr(m, name).double() for _, _, m in parts]) for name in ("mu", "var")),
    )


def moments(mixture: Mixture) -> tuple[Tensor, Tensor]:
    """Mean (d,) and variance (d,) of the mixture, in float64."""
    pi, mu, var = (t.double() for t in mixture)
    mean = pi @ mu
    return mean, pi @ (var + (mu - mean) ** 2)


def log_density(mixture: Mixture, x: Tensor) -> Tensor:
    """log p(x) (n,) for x (n, d), in float64."""
    pi, mu, var = (t.double() for t in mixture)
    scaled = (x.double()[:, None] - mu) ** 2 / var + var.log() + math.log(2 * math.pi)
    return (pi.log() - 0.5 * scaled.sum(2)).logsumexp(1)


def reduce(mixture: Mixture, most: int) -> Mixture:
    """At most `most` components: the closest pair is merged, as often as needed; mean and variance
    of the whole stay, in float64.

    Closest is the least rise of Runnalls' bound on the Kullback-Leibler divergence (2007, eq. 16),
    ((pi_i + pi_j) log|V_ij| - pi_i log|V_i| - pi_j log|V_j|) / 2, where V_ij is the variance of the
    merged pair."""
    pi, mu, var = (t.double().clone() for t in mixture)
    k, alive = len(pi), torch.ones(len(pi), dtype=torch.bool)

    def merged(i: int) -> Mixture:
        """Component i merged with each of all components."""
        weight = pi + pi[i]
        share = (pi / weight.clamp_min(_TINY))[:, None]
        return Mixture(
            weight,
            mu[i] + share * (mu - mu[i]),
            share * var + (1 - share) * var[i] + share * (1 - share) * (mu - mu[i]) ** 2,
        )

    def rise(i: int) -> Tensor:
        size = pi * var.log().sum(1)
        found = merged(i)
        cost = (found.pi * found.var.log().sum(1) - size - size[i]) / 2
        return cost.masked_fill(~alive | (torch.arange(k) == i), torch.inf)

    if k > most:
        cost = torch.stack([rise(i) for i in range(k)])
    for _ in range(k - most):
        i, j = sorted(divmod(int(cost.argmin()), k))
        pair = merged(i)
        pi[i], mu[i], var[i] = pair.pi[j], pair.mu[j], pair.var[j]
        alive[j] = False
        cost[j] = cost[:, j] = torch.inf
        cost[i] = cost[:, i] = rise(i)
    return Mixture(pi[alive], mu[alive], var[alive])


def generate_counts(
    counts: Tensor, available: Tensor, target: str | int, global_max: int
) -> Tensor:
    """How many samples to draw of each class, so that each reaches the target; real samples are
    never discarded.

    Args: counts: (..., C) the client's own samples by class. available: (C,) whether the class has
        a mixture. target: "client_max" (its own largest class), "global_max" (that of any client,
        `global_max`), or a number.
    Raises:
        ValueError: a negative count, or a target that is none of these.
    """
    if counts.is_floating_point() or (counts < 0).any():
        raise ValueError(f"counts {counts.tolist()}; whole numbers >= 0 are expected")
    goal: Tensor | int
    if target == "client_max":
        goal = counts.amax(-1, keepdim=True)
    else:
        goal = global_max if target == "global_max" else target  # type: ignore[assignment]
        if isinstance(goal, bool) or not isinstance(goal, int) or goal < 0:
            raise ValueError(
                f"target={target!r} with global_max={global_max!r}; choose {' or '.join(TARGETS)},"
                " or give a number >= 0"
            )
    return (goal - counts).clamp_min(0) * available.to(counts.dtype)


def sample(mixture: Mixture, n: int, draws: np.random.Generator) -> Tensor:
    """(n, d) float32 samples, clipped to [0, 1], one component after the other: how many of each is
    multinomial."""
    pi = mixture.pi.double().numpy()
    out = np.empty((n, mixture.mu.shape[1]), dtype=np.float32)
    start = 0
    for k, m in enumerate(draws.multinomial(n, pi / pi.sum())):
        mu, std = mixture.mu[k].numpy(), mixture.var[k].sqrt().numpy()
        out[start : start + m] = mu + std * draws.standard_normal((m, len(mu)), dtype=np.float32)
        start += m
    return torch.from_numpy(out).clamp_(0, 1)
