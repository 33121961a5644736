"""FedNTD (Lee et al. 2022): distillation of the classes other than the label."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def not_true_distillation(logits: Tensor, logits_global: Tensor, y: Tensor, tau: float) -> Tensor:
    """(B,): tau^2 KL(global || local) of softmax(logits / tau) over the C - 1 classes other than y
    (B,); logits are (B, C).

    Two classes leave one, and 0. Raises ValueError where there are fewer.
    """
    if logits.shape[1] < 2:
        raise ValueError(
            "distilling the classes other than the label needs two classes or more; the logits are"
            f" {tuple(logits.shape)}"
        )
    others = torch.arange(logits.shape[1] - 1, device=y.device)
    others = others + (others >= y[:, None])
    log_p, log_q = (
        functional.log_softmax(all_classes.gather(1, others) / tau, 1)
        for all_classes in (logits_global, logits)
    )
    return tau**2 * functional.kl_div(log_q, log_p, log_target=True, reduction="none").sum(1)
