"""Server optimisers on the pseudo-gradient delta = new - old, one tensor at a time, in float64.

FedAvgM: Hsu et al. 2019, "Measuring the effects of non-identical data distribution". FedAdam,
FedYogi, FedAdagrad: Reddi et al. 2021, "Adaptive federated optimization", Algorithm 2, without bias
correction."""

from __future__ import annotations

from torch import Tensor


def momentum(
    x: Tensor, delta: Tensor, v: Tensor, *, lr: float, beta: float, nesterov: bool
) -> tuple[Tensor, Tensor]:
    """v <- beta v - delta; x <- x - lr v (heavy ball), or x <- x - lr (-delta + beta v) with
    Nesterov. Returns (x, v)."""
    v = beta * v - delta
    return x - lr * (beta * v - delta if nesterov else v), v


def adaptive(
    x: Tensor,
    delta: Tensor,
    m: Tensor,
    v: Tensor,
    *,
    kind: str,
    lr: float,
    beta1: float,
    beta2: float,
    tau: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """m <- beta1 m + (1 - beta1) delta; v by `kind`; x <- x + lr m / (sqrt v + tau). Returns (x, m,
    v).

    v: adam beta2 v + (1 - beta2) delta^2; yogi v - (1 - beta2) delta^2 sign(v - delta^2); adagrad v
    + delta^2."""
    square = delta * delta
    m = beta1 * m + (1 - beta1) * delta
    if kind == "adam":
        v = beta2 * v + (1 - beta2) * square
    elif kind == "yogi":
        v = v - (1 - beta2) * square * (v - square).sign()
    elif kind == "adagrad":
        v = v + square
    else:
        raise ValueError(f"kind={kind!r}; known are adam, yogi, adagrad")
    return x + lr * m / (v.sqrt() + tau), m, v
