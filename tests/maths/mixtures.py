"""The moments and the density of a mixture, which FedGMM itself does not need."""

from __future__ import annotations

import math

from torch import Tensor

from fedhet.methods.fedgmm.gaussians import Mixture


def moments(mixture: Mixture) -> tuple[Tensor, Tensor]:
    """The mean (d,) and the variance (d,) of the mixture, in float64."""
    pi, mu, var = (t.double() for t in mixture)
    mean = pi @ mu
    return mean, pi @ (var + (mu - mean) ** 2)


def log_density(mixture: Mixture, x: Tensor) -> Tensor:
    """log p(x) for x (n, d), shape (n,), in float64."""
    pi, mu, var = (t.double() for t in mixture)
    scaled = (x.double()[:, None] - mu) ** 2 / var + var.log() + math.log(2 * math.pi)
    return (pi.log() - 0.5 * scaled.sum(2)).logsumexp(1)
