"""FedNTD (Lee et al. 2022): distillation of the classes other than the label."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def not_true_distillation(logits: Tensor, logits_global: Tensor, y: Tensor, tau: float) -> Tensor:
    """Return the not-true distillation loss of each sample, shape (B,).

    It is tau^2 KL(global || local) between the two softmax(logits / tau) over the C - 1 classes
    other than the label. With two classes only one is left, and the loss is 0.

    Args:
        logits: (B, C) logits of the local model.
        logits_global: (B, C) logits of the global model.
        y: (B,) labels.
        tau: the temperature.

    Raises:
        ValueError: there are fewer than two classes.
    """
    if logits.shape[1] < 2:
        raise ValueError(
            "distillation of the classes other than the label needs at least two classes;"
            f" the logits have shape {tuple(logits.shape)}"
        )
    others = torch.arange(logits.shape[1] - 1, device=y.device)
    others = others + (others >= y[:, None])
    log_p = functional.log_softmax(logits_global.gather(1, others) / tau, 1)
    log_q = functional.log_softmax(logits.gather(1, others) / tau, 1)
    return tau**2 * functional.kl_div(log_q, log_p, log_target=True, reduction="none").sum(1)
