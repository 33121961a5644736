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
from fedhet.core.client import training
from fedhet.core.client.optimizers import SGD
from fedhet.core.kernel import Term
from fedhet.core.messages import LocalSettings, WithExtras
from fedhet.core.server.server_opt import FedAvgM, FedOpt, ServerOptimizer
from fedhet.methods.fednorm import FedNormPlugin, contribution
from fedhet.methods.fedprox import FedProxPlugin, away
from fedhet.methods.scaffold import Scaffold, option_ii

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
from maths.controls import replaced, step_of

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
    # As in a run, the option, the reply and the mean refuse what has no weights.
    plugin = FedNormPlugin(temperature=params["T"])
    scaled = Z / Z.abs().max().clamp(min=1)  # one case is beyond what a reply may have
    WithExtras(extras={"z": scaled}).tensor("z")
    trees.mean(({"z": z}, float(weight)) for z, weight in zip(Z, nu, strict=True))
    result = contribution(Z, nu, plugin.temperature)
    return {"S": result.similarity, "Lambda": result.factors, "w": result.weights}


def _fedavg(params: Params, W: Tensor, n: Tensor) -> dict[str, Tensor]:
    return trees.mean(({"x": w}, float(k)) for w, k in zip(W, n, strict=True))


def _sgd_step(w: Tensor, grads: list[Tensor], lr: float) -> Tensor:
    w = w.clone()
    SGD([w], LocalSettings(lr=lr)).step(grads)  # type: ignore[list-item]
    return w


def _prox_step(params: Params, w: Tensor, g: Tensor, w_global: Tensor) -> dict[str, Tensor]:
    grads, anchor = {"w": g.clone()}, {"w": w_global}
    term = Term("gradient", away, anchor, FedProxPlugin(mu=params["mu"]).mu)
    training.alter(term, grads, {"w": w}, anchor)
    return {"w_new": _sgd_step(w, [grads["w"]], params["lr"])}


def _server_rounds(
    optimizer: ServerOptimizer, x: Tensor, W: Tensor, n: Tensor
) -> dict[str, Tensor]:
    new, state = {"x": x}, {}
    for models in W:
        new, state = optimizer.step(state, new, _fedavg({}, models, n))
    return {"x_new": new["x"], **{name: tree["x"] for name, tree in state.items()}}


def _fedavgm_rounds(params: Params, **inputs: Tensor) -> dict[str, Tensor]:
    return _server_rounds(FedAvgM(**params), **inputs)


def _fedopt_rounds(params: Params, **inputs: Tensor) -> dict[str, Tensor]:
    return _server_rounds(FedOpt(**params), **inputs)


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
    # All N clients have the control c. Then each participant's becomes c + dc.
    scaffold = Scaffold(lr_g=params["lr_g"], control="gradient", control_weights="uniform")
    step, state = step_of(x, params["N"]), {"total": {"x": c * params["N"]}, "lambda": {}}
    updates = (replaced(i, c, c + d, move) for i, (d, move) in enumerate(zip(dc, dy, strict=True)))
    merged = scaffold.merge(step, state, {"x": x}, updates)
    c_new = scaffold.broadcast(step, merged.state)["c"]
    assert isinstance(c_new, dict)
    return {"x_new": merged.weights["x"], "c_new": c_new["x"]}


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
