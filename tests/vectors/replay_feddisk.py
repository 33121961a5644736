"""FedDisk's functions for adapter.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fedhet.core import metrics
from fedhet.methods.feddisk import FedDiskPlugin, densities

Params = dict[str, Any]


def _masks(params: Params) -> densities.Masks:
    return densities.masks(params["D"], params["H"], params["kind"], seed=0)


def _replay_masks(params: Params) -> dict[str, Tensor]:
    mask = _masks(params)
    return {"degrees": mask.m1.sum(1), "M1": mask.m1, "M2": mask.m2, "paths": mask.m2 @ mask.m1}


def _made(params: Params, x: Tensor, **made: Tensor) -> dict[str, Tensor]:
    mask = _masks(params)
    return {"out": densities.logits(made, mask, x).sigmoid(), "nll": densities.nll(made, mask, x)}


def _made_sample(params: Params, U: Tensor, **made: Tensor) -> dict[str, Tensor]:
    return {"x": densities.sample(made, _masks(params), U)}


def _sample_weights(params: Params, p: Tensor) -> dict[str, Tensor]:
    options = {name: params[name] for name in ("lo", "hi", "eps", "normalise") if name in params}
    plugin = FedDiskPlugin(**options)
    r = densities.density_ratio(p, params["n_local"], params["n_global"], plugin.eps)
    return {"r": r, "w": densities.sample_weights(r, plugin.lo, plugin.hi, plugin.normalise)}


def _ecr(params: Params, acc: Tensor) -> dict[str, int | None]:
    return {
        "baseline": metrics.effective_rounds(acc),
        "to_target": metrics.effective_rounds(acc, params["target"]),
    }


FUNCTIONS: dict[tuple[str, str], Callable[..., dict[str, Any]]] = {
    ("feddisk", "masks"): _replay_masks,
    ("feddisk", "made"): _made,
    ("feddisk", "made_sample"): _made_sample,
    ("feddisk", "sample_weights"): _sample_weights,
    ("feddisk", "comm_cost"): lambda params: {"cost": metrics.comm_cost(**params)},
    ("feddisk", "ecr"): _ecr,
}
