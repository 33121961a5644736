"""FedProx (Li et al. 2020, eq. 2): the proximal term mu/2 |w - x|^2."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def add_proximal(
    grads: list[Tensor], params: Sequence[Tensor], anchors: Sequence[Tensor], mu: float
) -> None:
    """Add the gradient of the proximal term in place: g <- g + mu (w - x) (eq. 2).

    Args:
        grads: g, one tensor per parameter.
        params: the current parameters w, of the same shapes.
        anchors: the parameters x towards which the term pulls, of the same shapes.
        mu: the strength of the term.
    """
    torch._foreach_add_(grads, torch._foreach_sub(list(params), list(anchors)), alpha=mu)
