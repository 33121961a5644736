"""FedROD (Chen and Chao 2022): the balanced softmax loss."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def balanced_softmax(logits: Tensor, y: Tensor, counts: Tensor, gamma: float) -> Tensor:
    """Return the balanced softmax loss of each sample, shape (B,).

    It is the cross entropy of the adjusted logits l_c + gamma log n_c. A class with n_c = 0 gets
    no probability; gamma = 0 gives the plain cross entropy.

    Args:
        logits: (B, C) the logits l_c.
        y: (B,) labels.
        counts: (C,) the client's numbers n_c of samples by class.
        gamma: the strength of the adjustment.

    Raises:
        ValueError: a label has the count 0.
    """
    if not counts[y].all():
        raise ValueError(
            f"the labels include classes with count 0; the counts are {counts.tolist()}"
        )
    return functional.cross_entropy(balanced_logits(logits, counts, gamma), y, reduction="none")


def balanced_logits(logits: Tensor, counts: Tensor, gamma: float) -> Tensor:
    """Return the adjusted logits l_c + gamma log n_c, whose cross entropy is the loss."""
    return logits + torch.xlogy(gamma, counts.to(logits.dtype))
