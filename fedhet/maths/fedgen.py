"""FedGen (Zhu et al. 2021): the ensemble of the clients' heads and the diversity term.

Suffixes of names give shapes: K clients, B samples, C classes, d features, m noise coordinates.
"""

from __future__ import annotations

import torch
from torch import Tensor


def label_shares(counts: Tensor) -> Tensor:
    """Return the clients' shares of each label, a_k^y = n_k^y / sum_j n_j^y, shape (K, C).

    Args:
        counts: (K, C) the numbers n_k^y of each client's samples by label. The shares of a label
            that no client has are 0.
    """
    return counts / counts.sum(0).clamp(min=1)


def ensemble(logits_KBC: Tensor, shares_KC: Tensor, y_B: Tensor) -> Tensor:
    """Return the ensemble's logits, sum_k a_k^y h_k(z), shape (B, C).

    The heads h_k are weighted for each sample by the shares a_k^y of that sample's own label y.
    """
    return torch.einsum("kb,kbc->bc", shares_KC[:, y_B], logits_KBC)


def diversity(z_Bd: Tensor, noise_Bm: Tensor) -> Tensor:
    """Return the diversity term exp(-mean_ij |z_i - z_j|_1 |eps_i - eps_j|^2), a scalar in (0, 1].

    It is 1 where all generated features z are equal. As in the authors' program, both distances
    are means over coordinates: with sums, the exponential would underflow to 0 at every width
    that is used in practice.
    """
    feature_distances = torch.cdist(z_Bd, z_Bd, p=1) / z_Bd.shape[1]
    noise_distances = torch.cdist(noise_Bm, noise_Bm).square() / noise_Bm.shape[1]
    return (-(feature_distances * noise_distances).mean()).exp()
