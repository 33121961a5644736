"""FedPCL's prototypes and its contrastive losses: pure functions of tensors. Row c of a set of
prototypes is class c, always."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

DENOMINATORS = ("all", "others")


def prototypes(z_nd: Tensor, y_n: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """((C, d) the mean of z over each class, 0 where there is none, float64; (C,) which classes
    there are)."""
    counts = y_n.bincount(minlength=classes)
    sums = z_nd.new_zeros(classes, z_nd.shape[1], dtype=torch.float64).index_add_(
        0, y_n, z_nd.double()
    )
    return sums / counts.clamp(min=1)[:, None], counts > 0


def pooled(means_KCd: Tensor, has_KC: Tensor) -> tuple[Tensor, Tensor]:
    """((C, d) the plain mean over the clients that have the class, 0 where nobody does, float64;
    (C,) whether anybody does)."""
    sums = torch.where(has_KC[..., None], means_KCd.double(), 0).sum(0)
    return sums / has_KC.sum(0).clamp(min=1)[:, None], has_KC.any(0)


def contrast(scores_BC: Tensor, y_B: Tensor, known_C: Tensor, denominator: str) -> Tensor:
    """(..., B): -s_y + log sum_c exp s_c over the known classes c: "all" of them, or the "others"
    than y. `scores` is (..., B, C).

    0 where nothing is to be told apart: the class y is not known, or no other one is.
    """
    label = y_B.expand(scores_BC.shape[:-1])[..., None]
    left_out = (
        (~known_C).expand(scores_BC.shape).scatter(-1, label, True)
        if denominator == "others"
        else ~known_C
    )
    losses = scores_BC.masked_fill(left_out, -torch.inf).logsumexp(-1) - scores_BC.gather(
        -1, label
    ).squeeze(-1)
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
    """(B,): the contrast with the global prototypes, and the mean of those with every client's. z
    has length 1."""
    globe = contrast(z_Bd @ mean_Cd.T / tau, y_B, known_C, denominator)
    each_KB = contrast(
        torch.einsum("bd,kcd->kbc", z_Bd, clients_KCd) / tau, y_B, known_C, denominator
    )
    return globe + each_KB.mean(0)


def cosines(z_Bd: Tensor, mean_Cd: Tensor, known_C: Tensor) -> Tensor:
    """(B, C): the cosine with each prototype, -inf for unknown classes."""
    return (normalize(z_Bd) @ normalize(mean_Cd).T).masked_fill(~known_C, -torch.inf)
