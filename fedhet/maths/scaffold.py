"""SCAFFOLD (Karimireddy et al. 2020), one tensor at a time.

Names follow the paper's Algorithm 1: c is the server's control variate, c_i that of client i, x
the global model, y the client's model. All tensors of one call have the same shape.
"""

from __future__ import annotations

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
