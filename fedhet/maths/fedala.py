"""FedALA (Zhang et al. 2023): the adaptive local aggregation of one client's top layers. Lists run
over tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def start(
    local: Sequence[Tensor], received: Sequence[Tensor], weights: Sequence[Tensor]
) -> list[Tensor]:
    """w + (x - w) A, entry by entry: exactly x where A = 1, exactly w where A = 0."""
    return list(torch._foreach_lerp(list(local), list(received), list(weights)))


def step(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    local: Sequence[Tensor],
    received: Sequence[Tensor],
    eta: float,
) -> list[Tensor]:
    """A <- clip(A - eta g (x - w), 0, 1), with g the loss's gradient at `start`."""
    moved = torch._foreach_sub(list(received), list(local))
    torch._foreach_mul_(moved, list(grads))
    return [a.clamp(0, 1) for a in torch._foreach_sub(list(weights), moved, alpha=eta)]
