"""SCAFFOLD (Karimireddy et al. 2020), one tensor at a time.

Names follow the paper's Algorithm 1: c is the server's control variate, c_i that of client i, x
the global model, y the client's model. All tensors of one call have the same shape.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def correction(c: Tensor, c_i: Tensor) -> Tensor:
    """Return c - c_i, which is added to each local gradient: y <- y - lr (g - c_i + c)."""
    return c - c_i


def control_change(c: Tensor, dy: Tensor, steps_lr: float) -> Tensor:
    """Return the change of the client's control variate by option II, c_i+ - c_i.

    It is -c - dy / (steps lr), where dy = y - x is the client's change after plain SGD steps.

    Args:
        c: the server's control variate.
        dy: y - x.
        steps_lr: the number of steps times their learning rate.
    """
    return (dy / -steps_lr).sub_(c)


def control_sum(
    total: Tensor,
    shares: Sequence[float],
    c_plus: Sequence[Tensor],
    before: Sequence[float],
    c_i: Sequence[Tensor],
) -> Tensor:
    """Return the updated sum A <- A + sum_i (lambda_i,new c_i+ - lambda_i,old c_i).

    The server's control variate is c = A / sum_j lambda_j, over all clients. With lambda = 1
    everywhere this is the paper's rule c <- c + (1/N) sum_i dc_i.

    Args:
        total: A.
        shares: lambda_i,new of each participant.
        c_plus: c_i+ of each participant.
        before: lambda_i,old of each participant.
        c_i: c_i of each participant.
    """
    for new, plus, old, own in zip(shares, c_plus, before, c_i, strict=True):
        total = total + new * plus - old * own
    return total
