"""Averages that some of their terms cannot move far: median, trimmed mean, Krum's scores.

Sources: Yin, Chen, Ramchandran and Bartlett 2018, "Byzantine-robust distributed learning: towards
optimal statistical rates", definitions 1 and 2; Blanchard, El Mhamdi, Guerraoui and Stainer 2017,
"Machine learning with adversaries: Byzantine tolerant gradient descent", section 4.
"""

from __future__ import annotations

import torch
from torch import Tensor


def median(values: Tensor) -> Tensor:
    """(K, ...) -> (...): of each entry the median over K; of an even K the mean of the middle two.

    The order of the K does not matter, bit for bit.
    """
    ordered = values.sort(dim=0).values
    k = len(values)
    return (ordered[(k - 1) // 2] + ordered[k // 2]) / 2


def trimmed_mean(values: Tensor, share: float) -> Tensor:
    """(K, ...) -> (...): of each entry the mean without its largest and its smallest values.

    The order of the K does not matter, bit for bit.

    Args:
        values: the values of K clients.
        share: the share of the K that is left out at each end, in [0, .5), rounded down.
    """
    k = len(values)
    cut = int(round(share * k, 9))  # as floats, .29 of 100 is slightly below 29
    return values.sort(dim=0).values[cut : k - cut].mean(dim=0)


def squared_distances(values: Tensor) -> Tensor:
    """(K, n) -> (K, K): the squared Euclidean distance of each pair of rows."""
    # Not from scalar products, which would lose the digits in which close rows differ.
    return torch.cdist(values, values, compute_mode="donot_use_mm_for_euclid_dist").square()


def krum_scores(distances: Tensor, attackers: int) -> Tensor:
    """(K, K) squared distances -> (K,): of each row the sum of the K - attackers - 2 smallest.

    The distance of a row to itself does not count. Small scores are good.

    Raises:
        ValueError: K is less than 2 attackers + 3, which the paper's proposition 1 requires.
    """
    k = len(distances)
    if k < 2 * attackers + 3:
        raise ValueError(
            f"Krum with {attackers} attackers needs at least {2 * attackers + 3} updates, got {k}"
        )
    others = distances[~torch.eye(k, dtype=torch.bool, device=distances.device)].view(k, k - 1)
    return others.sort(dim=1).values[:, : k - attackers - 2].sum(dim=1)
