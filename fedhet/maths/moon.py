"""MOON (Li, He and Song 2021): the model-contrastive loss."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def contrastive(z: Tensor, z_global: Tensor, z_previous: Tensor, tau: float) -> Tensor:
    """Return the model-contrastive loss of each sample, shape (B,).

    It is -log(e^{s_g / tau} / (e^{s_g / tau} + e^{s_p / tau})), where s_g and s_p are the cosine
    similarities of z with z_global and with z_previous. The cosine with a zero vector is 0 (norms
    are bounded below by 1e-8).

    Args:
        z: (B, d) features of the model in training.
        z_global: (B, d) features of the global model.
        z_previous: (B, d) features of the client's previous model.
        tau: the temperature.
    """
    s_global = functional.cosine_similarity(z, z_global, dim=1, eps=1e-8)
    s_previous = functional.cosine_similarity(z, z_previous, dim=1, eps=1e-8)
    return -functional.logsigmoid((s_global - s_previous) / tau)
