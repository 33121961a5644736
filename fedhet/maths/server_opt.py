"""Server optimisers on the pseudo-gradient delta = new - old, one tensor at a time, in float64.

FedAvgM: Hsu et al. 2019, "Measuring the effects of non-identical data distribution".
FedAdam, FedYogi, FedAdagrad: Reddi et al. 2021, "Adaptive federated optimization", Algorithm 2,
without bias correction.

x is the server's value; all tensors of one call have its shape.
"""

from __future__ import annotations

from torch import Tensor


def momentum(
    x: Tensor, delta: Tensor, v: Tensor, *, lr: float, beta: float, nesterov: bool
) -> tuple[Tensor, Tensor]:
    """Take one step of FedAvgM and return the new (x, v).

        v <- beta v - delta
        x <- x - lr v                    (heavy ball)
        x <- x - lr (-delta + beta v)    (Nesterov)

    Args:
        x: the server's value.
        delta: the change that the method proposes.
        v: the momentum.
        lr: the server's learning rate.
        beta: the decay of the momentum.
        nesterov: whether to use Nesterov momentum instead of the heavy ball.
    """
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
    """Take one step of FedAdam, FedYogi or FedAdagrad and return the new (x, m, v).

        m <- beta1 m + (1 - beta1) delta
        v <- beta2 v + (1 - beta2) delta^2                    (adam)
        v <- v - (1 - beta2) delta^2 sign(v - delta^2)        (yogi)
        v <- v + delta^2                                      (adagrad)
        x <- x + lr m / (sqrt v + tau)

    Args:
        x: the server's value.
        delta: the change that the method proposes.
        m: the first moment.
        v: the second moment.
        kind: "adam", "yogi" or "adagrad".
        lr: the server's learning rate.
        beta1: the decay of m.
        beta2: the decay of v, which adagrad does not use.
        tau: the degree of adaptivity, added to the denominator.

    Raises:
        ValueError: `kind` is unknown.
    """
    square = delta * delta
    m = beta1 * m + (1 - beta1) * delta
    if kind == "adam":
        v = beta2 * v + (1 - beta2) * square
    elif kind == "yogi":
        v = v - (1 - beta2) * square * (v - square).sign()
    elif kind == "adagrad":
        v = v + square
    else:
        raise ValueError(f"kind={kind!r} is unknown; choose adam, yogi or adagrad")
    return x + lr * m / (v.sqrt() + tau), m, v
