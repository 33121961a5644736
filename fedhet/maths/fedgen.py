"""FedGen's ensemble of heads and its diversity term: pure functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def label_shares(counts: Tensor) -> Tensor:
    """counts (K, C) of K clients' labels -> (K, C): a_k^y = n_k^y / sum_j n_j^y, 0 for labels that
    nobody has."""
    return counts / counts.sum(0).clamp(min=1)


def ensemble(logits_KBC: Tensor, shares_KC: Tensor, y_B: Tensor) -> Tensor:
    """(B, C): sum_k a_k^y h_k(z), each sample under the shares of its own label."""
    return torch.einsum("kb,kbc->bc", shares_KC[:, y_B], logits_KBC)


def diversity(z_Bd: Tensor, noise_Bm: Tensor) -> Tensor:
    """A scalar in (0, 1], exp(-mean_ij |z_i - z_j|_1 |eps_i - eps_j|^2): 1 where all samples are
    the same.

    Both distances are means over coordinates, as in the original program: the exponential of their
    sums is 0 in any width of use."""
    features = torch.cdist(z_Bd, z_Bd, p=1) / z_Bd.shape[1]
    noises = torch.cdist(noise_Bm, noise_Bm).square() / noise_Bm.shape[1]
    return (-(features * noises).mean()).exp()
