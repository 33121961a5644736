"""FedSA's functions for adapter.py.

What the package computes for the high entries only is spread over all entries, as in the vectors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedhet.core.messages import WithExtras
from fedhet.methods import fedsa
from fedhet.methods.fedsa import FedSA


def _aggregate_tensor(params: dict[str, Any], W: Tensor) -> dict[str, Tensor]:
    options = FedSA(**params)
    WithExtras(extras={"W": W}).tensor("W")  # as a run refuses the reply
    result = fedsa.aggregate_tensor(W, options)

    def spread(values: Tensor) -> Tensor:
        out = values.new_zeros(len(values), W.shape[1])
        out[:, result.high] = values
        return out

    labels = torch.full((len(W),), -1)
    for s, members in enumerate(result.clusters):
        labels[members] = s
    high = torch.zeros(W.shape[1], dtype=torch.bool)
    high[result.high] = True
    out = {
        "w": result.w,
        "cv": result.cv,
        "high": high,
        "cluster": labels,
        "sim": result.sim,
        "mic": spread(result.mic),
    }
    if result.clusters:
        counts = fedsa.class_counts(result.mac, options.C)
        out |= {
            "mac": spread(result.mac),
            "alpha": spread(fedsa.cluster_weights(result.mac, counts, options)),
            "wbar": fedsa.cluster_means(W.double(), result.clusters),
        }
    return out


def _cluster(params: dict[str, Any], SIM: Tensor) -> dict[str, Any]:
    clusters = fedsa.cluster(SIM, FedSA(**params))
    unclustered = sorted({*range(len(SIM))}.difference(*clusters))
    return {"clusters": clusters, "unclustered": unclustered}


FUNCTIONS = {("fedsa", "aggregate_tensor"): _aggregate_tensor, ("fedsa", "cluster"): _cluster}
