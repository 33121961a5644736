"""Replays a test vector through the package's own functions.

The names of inputs and outputs are those of manifest.json.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhet.core import trees
from fedhet.core.messages import LocalSettings, Update
from fedhet.core.optimizers import SGD
from fedhet.core.server_opt import FedAvgM, FedOpt, ServerOptimizer
from fedhet.methods.fednorm import contribution
from fedhet.methods.fedprox import FedProxPlugin, add_proximal
from fedhet.methods.scaffold import ControlVariates, option_ii

# For a program that loads this file by its path: the files beside it, and tests/.
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import replay_baselines
import replay_fedala
import replay_feddisk
import replay_fedgmm
import replay_fedlex
import replay_fedsa
import replay_hosts
from convergence.quadratic import final_weight

Params = dict[str, Any]


def replay(
    method: str, fn: str, params: Params, inputs: dict[str, np.ndarray]
) -> dict[str, np.ndarray | float]:
    """What the package computes for one case.

    Raises:
        ValueError: the package refuses the input.
        LookupError: there is no such function.
    """
    if (method, fn) not in _FUNCTIONS:
        raise LookupError(f"{method}/{fn} cannot be replayed; known are {sorted(_FUNCTIONS)}")
    tensors = {name: torch.from_numpy(np.asarray(array)) for name, array in inputs.items()}
    outputs = _FUNCTIONS[method, fn](params, **tensors)
    return {name: v.numpy() if isinstance(v, Tensor) else v for name, v in outputs.items()}


def _fednorm_weights(params: Params, Z: Tensor, nu: Tensor) -> dict[str, Tensor]:
    result = contribution(Z, nu, params["T"])
    return {"S": result.similarity, "Lambda": result.factors, "w": result.weights}


def _fedavg(params: Params, W: Tensor, n: Tensor) -> dict[str, Tensor]:
    return trees.mean(({"x": w}, float(k)) for w, k in zip(W, n, strict=True))


def _sgd_step(w: Tensor, grads: list[Tensor], lr: float) -> Tensor:
    w = w.clone()
    SGD([w], LocalSettings(lr=lr)).step(grads)  # type: ignore[list-item]
    return w


def _prox_step(params: Params, w: Tensor, g: Tensor, w_global: Tensor) -> dict[str, Tensor]:
    grads = [g.clone()]
    add_proximal(grads, [w], [w_global], FedProxPlugin(mu=params["mu"]).mu)
    return {"w_new": _sgd_step(w, grads, params["lr"])}


def _server_rounds(optimizer: ServerOptimizer, x: Tensor, W: Tensor, n: Tensor) -> Tensor:
    for models in W:
        x = optimizer.step({"x": x}, _fedavg({}, models, n))["x"]
    return x


def _fedavgm_rounds(params: Params, **inputs: Tensor) -> dict[str, Tensor]:
    optimizer = FedAvgM(**params)
    return {"x_new": _server_rounds(optimizer, **inputs), "v": optimizer.v["x"]}


def _fedopt_rounds(params: Params, **inputs: Tensor) -> dict[str, Tensor]:
    optimizer = FedOpt(**params)
    return {
        "x_new": _server_rounds(optimizer, **inputs),
        "m": optimizer.m["x"],
        "v": optimizer.v["x"],
    }


def _scaffold_client(
    params: Params, x: Tensor, y: Tensor, c: Tensor, ci: Tensor, g: Tensor
) -> dict[str, Tensor]:
    change = trees.Difference({"c": y}, {"c": x})
    dc = option_ii({"c": c}, change, params["steps"] * params["lr"])["c"]
    corrected = trees.add({"g": g}, {"g": c - ci})["g"]
    return {
        "dc": dc,
        "c_plus": trees.add({"c": ci}, {"c": dc})["c"],
        "y_step": _sgd_step(y, [corrected], params["lr"]),
    }


def _scaffold_server(
    params: Params, x: Tensor, c: Tensor, dy: Tensor, dc: Tensor
) -> dict[str, Tensor]:
    # First all N clients have the control c. Then each participant's becomes c + dc.
    controls = ControlVariates({"c": c}, params["N"], "gradient", "uniform")
    _replace_controls(controls, torch.zeros_like(c), [c] * params["N"])
    _replace_controls(controls, c, [c + d for d in dc])
    c_new = controls.begin_step()["scaffold.c"]
    assert isinstance(c_new, dict)
    mean = trees.mean(({"x": d}, 1.0) for d in dy)
    return {
        "x_new": trees.add({"x": x}, mean, params["lr_g"])["x"],
        "c_new": c_new["c"],
    }


def _replace_controls(controls: ControlVariates, c_i: Tensor, c_plus: list[Tensor]) -> None:
    """One step, in which clients 0, 1, ... replace the control c_i, the same for all."""
    controls.begin_step()
    for pid, plus in enumerate(c_plus):
        extras = {"scaffold.c_plus": {"c": plus}, "scaffold.c_i": {"c": c_i}}
        controls.add_participant(Update(extras=extras, pid=pid, num_examples=1), lr=1.0)
    controls.update_sum()


_FUNCTIONS: dict[tuple[str, str], Callable[..., dict[str, Any]]] = {
    ("convergence", "quadratic"): lambda params: {"w": final_weight(**params)},
    ("fednorm", "weights"): _fednorm_weights,
    ("hosts", "fedavg"): _fedavg,
    ("hosts", "prox_step"): _prox_step,
    ("hosts", "fedavgm_rounds"): _fedavgm_rounds,
    ("hosts", "fedopt_rounds"): _fedopt_rounds,
    ("hosts", "scaffold_client"): _scaffold_client,
    ("hosts", "scaffold_server"): _scaffold_server,
    **replay_baselines.FUNCTIONS,
    **replay_fedala.FUNCTIONS,
    **replay_feddisk.FUNCTIONS,
    **replay_fedgmm.FUNCTIONS,
    **replay_fedlex.FUNCTIONS,
    **replay_fedsa.FUNCTIONS,
    **replay_hosts.FUNCTIONS,
}
