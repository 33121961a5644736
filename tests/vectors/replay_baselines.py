"""The losses of MOON, FedNTD and FedROD for adapter.py.

The vectors hold means over the batch; the package computes losses per sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fedhet.core.targets import cross_entropy
from fedhet.methods.fedntd import FedNTDPlugin, not_true_distillation
from fedhet.methods.fedrod import balanced_softmax
from fedhet.methods.moon import MoonPlugin, contrastive

Params = dict[str, Any]


def _moon_loss(
    params: Params, logits: Tensor, y: Tensor, z: Tensor, z_global: Tensor, z_prev: Tensor
) -> dict[str, Tensor]:
    plugin = MoonPlugin(**params)
    terms = contrastive(z, z_global, z_prev, plugin.tau)
    loss = (cross_entropy(logits, y) + plugin.mu * terms).mean()
    return {"contrastive": terms.mean(), "loss": loss}


def _ntd_loss(params: Params, local: Tensor, glob: Tensor, y: Tensor) -> dict[str, Tensor]:
    plugin = FedNTDPlugin(**params)
    distilled = not_true_distillation(local, glob, y, plugin.tau)
    return {"loss": (cross_entropy(local, y) + plugin.beta * distilled).mean()}


def _balanced_softmax(params: Params, **inputs: Tensor) -> dict[str, Tensor]:
    return {"loss": balanced_softmax(**inputs, **params).mean()}


FUNCTIONS: dict[tuple[str, str], Callable[..., dict[str, Any]]] = {
    ("hosts", "moon_loss"): _moon_loss,
    ("hosts", "ntd_loss"): _ntd_loss,
    ("hosts", "balanced_softmax"): _balanced_softmax,
}
