"""FedGMM's functions for adapter.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedhet.methods.fedgmm import gaussians as maths
from fedhet.methods.fedgmm.gaussians import Mixture

Params = dict[str, Any]


def _aggregate(params: Params, x: Tensor | None = None, **parts: Tensor) -> dict[str, Any]:
    mixtures = [_mixture(parts, j) for j in range(params["clients"])]
    mixture = maths.aggregate(params["counts"], mixtures)
    if mixture is None:
        return {"none": True}
    mean, variance = maths.moments(mixture)
    density = {} if x is None else {"logpdf": _log_density(mixture, x)}
    return {**mixture._asdict(), "mean": mean, "variance": variance, **density}


def _log_density(mixture: Mixture, x: Tensor) -> Tensor:
    """log p(x) of x (n, d), shape (n,)."""
    pi, mu, var = (t.double() for t in mixture)
    scaled = (x.double()[:, None] - mu) ** 2 / var + (2 * torch.pi * var).log()
    return (pi.log() - 0.5 * scaled.sum(2)).logsumexp(1)


def _mixture(parts: dict[str, Tensor], j: int) -> Mixture | None:
    """The mixture of client j; None where it has sent none."""
    if f"pi.{j}" not in parts:
        return None
    return Mixture(*(parts[f"{name}.{j}"] for name in Mixture._fields))


def _generate_counts(params: Params, counts: Tensor, available: Tensor) -> dict[str, Any]:
    return {"gen": maths.generate_counts(counts, available, params["target"], params["global_max"])}


FUNCTIONS: dict[tuple[str, str], Callable[..., dict[str, Any]]] = {
    ("fedgmm", "aggregate"): _aggregate,
    ("fedgmm", "generate_counts"): _generate_counts,
}
