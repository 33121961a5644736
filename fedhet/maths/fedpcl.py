"""FedPCL (Tan et al. 2022): class prototypes and the contrastive losses with them.

Suffixes of names give shapes: K clients, B or n samples, C classes, d features. In every set of
prototypes, row c belongs to class c.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

DENOMINATORS = ("all", "others")


def prototypes(z_nd: Tensor, y_n: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return a client's prototypes and which classes it has.

    Args:
        z_nd: features.
        y_n: labels.
        classes: C.

    Returns:
        (C, d) float64, the mean of z over each class, 0 for a class without samples; and (C,)
        bool, whether the class has samples.
    """
    counts = y_n.bincount(minlength=classes)
    sums = z_nd.new_zeros(classes, z_nd.shape[1], dtype=torch.float64)
    sums.index_add_(0, y_n, z_nd.double())
    return sums / counts.clamp(min=1)[:, None], counts > 0


def pooled(means_KCd: Tensor, counts_KC: Tensor) -> tuple[Tensor, Tensor]:
    """Return the global prototypes, means over the clients.

    Args:
        means_KCd: the clients' prototypes.
        counts_KC: whole numbers, or whether a client has the class, by which they are weighted.

    Returns:
        (C, d) float64, the means, 0 for a class that no client has; and (C,) bool, whether any
        client has the class.
    """
    sums = torch.where(counts_KC[..., None] > 0, means_KCd.double() * counts_KC[..., None], 0).sum(
        0
    )
    return sums / counts_KC.sum(0).clamp(min=1)[:, None], (counts_KC > 0).any(0)


def contrast(scores_BC: Tensor, y_B: Tensor, known_C: Tensor, denominator: str) -> Tensor:
    """Return the contrastive losses -s_y + log sum_c exp s_c, shape (..., B).

    A loss is 0 where there is nothing to contrast: the class y is unknown, or it is the only
    known class.

    Args:
        scores_BC: (..., B, C) the scores s.
        y_B: labels.
        known_C: which classes have a prototype; the sum runs over these only.
        denominator: "all" to sum over all known classes, or "others" to leave out y.
    """
    label = y_B.expand(scores_BC.shape[:-1])[..., None]
    left_out = ~known_C
    if denominator == "others":
        left_out = left_out.expand(scores_BC.shape).scatter(-1, label, True)
    own_score = scores_BC.gather(-1, label).squeeze(-1)
    losses = scores_BC.masked_fill(left_out, -torch.inf).logsumexp(-1) - own_score
    return losses.where(known_C[y_B] & (known_C.sum() > 1), 0)


def losses(
    z_Bd: Tensor,
    y_B: Tensor,
    mean_Cd: Tensor,
    clients_KCd: Tensor,
    known_C: Tensor,
    tau: float,
    denominator: str,
) -> Tensor:
    """Return the loss of each sample, shape (B,).

    It is the contrast with the global prototypes, plus the mean over clients of the contrast
    with each client's prototypes.

    Args:
        z_Bd: features of length 1.
        y_B: labels.
        mean_Cd: the global prototypes.
        clients_KCd: the clients' prototypes.
        known_C: which classes have a prototype.
        tau: the temperature.
        denominator: see `contrast`.
    """
    global_B = contrast(z_Bd @ mean_Cd.T / tau, y_B, known_C, denominator)
    scores_KBC = torch.einsum("bd,kcd->kbc", z_Bd, clients_KCd) / tau
    return global_B + contrast(scores_KBC, y_B, known_C, denominator).mean(0)


def cosines(z_Bd: Tensor, mean_Cd: Tensor, known_C: Tensor) -> Tensor:
    """Return the cosine of each sample with each prototype, (B, C), -inf for unknown classes."""
    return (normalize(z_Bd) @ normalize(mean_Cd).T).masked_fill(~known_C, -torch.inf)


def distances(z_Bd: Tensor, y_B: Tensor, mean_Cd: Tensor, known_C: Tensor) -> Tensor:
    """Return the sum over classes of |mean of z over the class - prototype|, a scalar (FedProto).

    Args:
        z_Bd: features.
        y_B: labels.
        mean_Cd: the global prototypes.
        known_C: which classes have a prototype; the sum runs over those of them that y has.
    """
    of_BC = (y_B[:, None] == torch.arange(len(known_C), device=y_B.device)).to(z_Bd.dtype)
    counts = of_BC.sum(0)
    means = of_BC.T @ z_Bd / counts.clamp(min=1)[:, None]
    counted = known_C & (counts > 0)
    return (means - mean_Cd).where(counted[:, None], 0).norm(dim=1).sum()


def nearness(z_Bd: Tensor, mean_Cd: Tensor, known_C: Tensor) -> Tensor:
    """Return 2 z.C_c - |C_c|^2, shape (B, C) (FedProto).

    It is -|z - C_c|^2 up to |z|^2, which all classes share: the largest one is the nearest class.
    Unknown classes have less than all others, by 1 or more, and no -inf: a sample of such a class
    would have an infinite loss, which means that a model has diverged.
    """
    scores = 2 * z_Bd @ mean_Cd.T - mean_Cd.square().sum(1)
    least = scores.masked_fill(~known_C, torch.inf).amin(1, keepdim=True).clamp(max=0)
    return torch.where(known_C, scores, least - 1)
