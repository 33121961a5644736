"""FedROD (Chen and Chao 2022): the balanced softmax loss."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def balanced_softmax(logits: Tensor, y: Tensor, counts: Tensor, gamma: float) -> Tensor:
    """(B,): the cross entropy of logits (B, C) + gamma log n_c at the labels y (B,); `counts` (C,)
    are the n_c.

    A class with n_c = 0 gets no probability. Raises ValueError where it is a label. gamma = 0 is
    the plain cross entropy."""
    if not counts[y].all():
        raise ValueError(f"the labels hold classes with count 0; the counts are {counts.tolist()}")
    return functional.cross_entropy(
        logits + torch.xlogy(gamma, counts.to(logits.dtype)), y, reduction="none"
    )
