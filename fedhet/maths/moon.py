"""MOON (Li, He and Song 2021): the model-contrastive loss."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def contrastive(z: Tensor, z_global: Tensor, z_previous: Tensor, tau: float) -> Tensor:
    """(B,): -log(e^{s_g / tau} / (e^{s_g / tau} + e^{s_p / tau})), s_g and s_p the cosines of z (B,
    d) with the other two (B, d).

    The cosine with a zero vector is 0 (norms are at least 1e-8).
    """
    s_global, s_previous = (
        functional.cosine_similarity(z, other, dim=1, eps=1e-8) for other in (z_global, z_previous)
    )
    return -functional.logsigmoid((s_global - s_previous) / tau)
