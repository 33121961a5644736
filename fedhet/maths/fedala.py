"""FedALA (Zhang et al. 2023): adaptive local aggregation of a client's top layers.

Symbols: w is the client's own model, x the global model that it has received, and A the
aggregation weights, with entries in [0, 1]. Each argument is a list with one tensor per
parameter; the tensors at one position have the same shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def start(
    local: Sequence[Tensor], received: Sequence[Tensor], weights: Sequence[Tensor]
) -> list[Tensor]:
    """Return the model from which local training starts, w + (x - w) A, entry by entry.

    An entry is exactly x where A = 1 and exactly w where A = 0.

    Args:
        local: w.
        received: x.
        weights: A.
    """
    return list(torch._foreach_lerp(list(local), list(received), list(weights)))


def step(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    local: Sequence[Tensor],
    received: Sequence[Tensor],
    eta: float,
) -> list[Tensor]:
    """Take one gradient step on the aggregation weights: A <- clip(A - eta g (x - w), 0, 1).

    Args:
        weights: A.
        grads: g, the gradient of the loss with respect to the model that `start` returns.
        local: w.
        received: x.
        eta: the learning rate of the aggregation weights.
    """
    slope = torch._foreach_sub(list(received), list(local))
    torch._foreach_mul_(slope, list(grads))
    return [a.clamp(0, 1) for a in torch._foreach_sub(list(weights), slope, alpha=eta)]
