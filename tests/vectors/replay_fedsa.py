"""FedSA's cases: what is computed at the high entries only is laid out over all entries, as the
manifest has it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedhet.maths import fedsa
from fedhet.maths.fedsa import Options


def _aggregate_tensor(params: dict[str, Any], W: Tensor) -> dict[str, Tensor]:
    options = Options(**params)
    found = fedsa.aggregate_tensor(W, options)

    def spread(values: Tensor) -> Tensor:
        out = values.new_zeros(len(values), W.shape[1])
        out[:, found.high] = values
        return out

    labels = torch.full((len(W),), -1)
    for s, members in enumerate(found.clusters):
        labels[members] = s
    high = torch.zeros(W.shape[1], dtype=torch.bool)
    high[found.high] = True
    out = {
        "w": found.w,
        "cv": found.cv,
        "high": high,
        "cluster": labels,
        "sim": found.sim,
        "mic": spread(found.mic),
    }
    if found.clusters:
        alpha = fedsa.cluster_weights(found.mac, fedsa.class_counts(found.mac, options.C), options)
        out |= {
            "mac": spread(found.mac),
            "alpha": spread(alpha),
            "wbar": fedsa.cluster_means(W.double(), found.clusters),
        }
    return out


def _cluster(params: dict[str, Any], SIM: Tensor) -> dict[str, Any]:
    clusters, unclustered = fedsa.cluster(SIM, Options(**params))
    return {"clusters": clusters, "unclustered": unclustered}


FUNCTIONS = {("fedsa", "aggregate_tensor"): _aggregate_tensor, ("fedsa", "cluster"): _cluster}
