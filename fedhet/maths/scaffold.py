"""SCAFFOLD (Karimireddy et al. 2020), one tensor at a time; names as in the paper's Algorithm 1."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def correction(c: Tensor, c_i: Tensor) -> Tensor:
    """What is added to each local gradient: y <- y - lr (g - c_i + c)."""
    return c - c_i


def control_change(c: Tensor, dy: Tensor, steps_lr: float) -> Tensor:
    """Option II: c_i+ - c_i = -c - dy / (steps lr), where dy = y - x after `steps` plain SGD steps
    of rate lr."""
    return (dy / -steps_lr).sub_(c)


def control_sum(
    total: Tensor,
    shares: Sequence[float],
    c_plus: Sequence[Tensor],
    before: Sequence[float],
    c_i: Sequence[Tensor],
) -> Tensor:
    """A <- A + sum_i (lambda_i,new c_i+ - lambda_i,old c_i); the server control is c = A / sum_j
    lambda_j over all clients.

    lambda = 1 everywhere is the original rule c <- c + (1/N) sum_i dc_i.
    """
    for new, plus, old, own in zip(shares, c_plus, before, c_i, strict=True):
        total = total + new * plus - old * own
    return total
