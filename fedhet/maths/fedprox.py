"""FedProx (Li et al. 2020, eq. 2): the gradient of mu/2 |w - x|^2."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def add_proximal(
    grads: list[Tensor], params: Sequence[Tensor], anchors: Sequence[Tensor], mu: float
) -> None:
    """g <- g + mu (w - x), in place."""
    torch._foreach_add_(grads, torch._foreach_sub(list(params), list(anchors)), alpha=mu)
