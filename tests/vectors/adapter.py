"""Replays a test vector through the package's own functions; the names in and out are the
manifest's."""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from fedhet import config, trees
from fedhet.engines import local
from fedhet.job import Job
from fedhet.maths.fednorm import contribution
from fedhet.maths.fedprox import add_proximal
from fedhet.maths.scaffold import control_change, control_sum, correction
from fedhet.messages import Broadcast, LocalSettings
from fedhet.methods.fedprox import FedProxPlugin
from fedhet.optimizers import SGD
from fedhet.plugin import Plugin
from fedhet.record.results import Run
from fedhet.server_opt import FedAvgM, FedOpt, ServerOptimizer
from fedhet.task import ClientData, Task

# whoever loads this file by its path finds those beside it
sys.path.insert(0, str(Path(__file__).parent))
import replay_baselines
import replay_fedala
import replay_feddisk
import replay_fedgmm
import replay_fedlex
import replay_fedsa
import replay_hosts

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
    found = _FUNCTIONS[method, fn](
        params, **{name: torch.from_numpy(np.asarray(array)) for name, array in inputs.items()}
    )
    return {
        name: value.numpy() if isinstance(value, Tensor) else value for name, value in found.items()
    }


def _fednorm_weights(params: Params, Z: Tensor, nu: Tensor) -> dict[str, Tensor]:
    found = contribution(Z, nu, params["T"])
    return {"S": found.similarity, "Lambda": found.factors, "w": found.weights}


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
    dc = control_change(
        c, trees.Difference({"y": y}, {"y": x})["y"], params["steps"] * params["lr"]
    )
    corrected = trees.add({"g": g}, {"g": correction(c, ci)})["g"]
    return {
        "dc": dc,
        "c_plus": trees.add({"c": ci}, {"c": dc})["c"],
        "y_step": _sgd_step(y, [corrected], params["lr"]),
    }


def _scaffold_server(
    params: Params, x: Tensor, c: Tensor, dy: Tensor, dc: Tensor
) -> dict[str, Tensor]:
    # The server keeps A = sum over all N clients of c_j. Only the change of a participant counts:
    # from 0 to dc here.
    ones, zeros = [1.0] * len(dc), list(torch.zeros_like(dc))
    total = control_sum(c * params["N"], ones, list(dc), ones, zeros)
    return {
        "x_new": trees.add({"x": x}, trees.mean(({"x": d}, 1.0) for d in dy), params["lr_g"])["x"],
        "c_new": total / params["N"],
    }


# ---- convergence: the real strategy and client classes, in the in-process engine


class Scalar(nn.Module):
    """The model w, in float64, whose features are the constant (1.0)."""

    def __init__(self, w0: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w0, dtype=torch.float64))

    def features(self, x: Tensor) -> Tensor:
        return torch.ones_like(x)

    def head(self, z: Tensor) -> Tensor:
        return self.w * z

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def quadratic(a: list[float], b: list[float], w0: float = 0.0) -> Task:
    """Client i has one sample, whose loss is a_i / 2 (w - b_i)^2."""

    def criterion(output: Tensor, y: Tensor) -> Tensor:
        return y[:, 0] / 2 * (output[:, 0] - y[:, 1]) ** 2

    clients = [
        ClientData(
            (torch.ones(1, 1, dtype=torch.float64), torch.tensor([pair], dtype=torch.float64))
        )  # type: ignore[arg-type]
        for pair in zip(a, b, strict=True)
    ]
    return Task(lambda: Scalar(w0), criterion, clients, None, 0)


class LocalSteps(Plugin):
    """Client i takes steps[i] epochs, with one batch each."""

    name = "local_steps"

    def __init__(self, steps: list[int]) -> None:
        super().__init__(steps=steps)
        self.steps = steps

    def prepare(self, msg: Broadcast) -> None:
        self.client.local = replace(msg.local, epochs=self.steps[msg.pid])


class _Job(Job):
    """A configured run with one plug-in more; `steps` is an int or one per client."""

    steps: int | list[int] = 1

    def plugins(self) -> list[Plugin]:
        return (
            super().plugins()
            if isinstance(self.steps, int)
            else [*super().plugins(), LocalSteps(self.steps)]
        )


def _option(cfg: DictConfig, key: str) -> str:
    """Where an option lives: in the method's own yaml, in that of a plug-in, or in that of the
    server optimiser."""
    if "." in key:
        return key
    homes = {
        "method": cfg.method,
        **{f"plugin.{name}": options for name, options in cfg.plugin.items()},
        "server_opt": cfg.server_opt,
    }
    return next(
        (f"{home}.{key}" for home, options in homes.items() if key in options), f"method.{key}"
    )


def _quadratic(params: Params) -> dict[str, float]:
    steps = params["steps"]
    chosen = f"method={params['method']}", f"plugin=[{','.join(params.get('plugins', []))}]"
    composed = config.cached(chosen)  # one for many cases: to compose takes longer than to train
    cfg = composed.cfg.copy()
    OmegaConf.set_readonly(cfg, False)
    settings = {
        "rounds": params["rounds"],
        "fraction": params.get("fraction", 1.0),
        "seed": params.get("seed", 0),
        "device": "cpu",
        "client.lr": params["lr"],
        "client.epochs": steps if isinstance(steps, int) else 1,
        "client.batch_size": 1,
        "eval.every": params["rounds"],
        "eval.clients": False,
        **{_option(cfg, key): value for key, value in params.get("method_args", {}).items()},
    }
    for key, value in settings.items():
        OmegaConf.update(cfg, key, value)
    config.validate(cfg)
    with (
        tempfile.TemporaryDirectory() as home,
        redirect_stdout(io.StringIO()),
        redirect_stderr(io.StringIO()),
    ):
        job = _Job(
            replace(composed, cfg=cfg, run_dir=f"{home}/run"),
            quadratic(params["a"], params["b"], params.get("w0", 0.0)),
        )
        job.steps = steps
        return {"w": float(Run.read(local.run(job)).weights["w"])}


_FUNCTIONS: dict[tuple[str, str], Callable[..., dict[str, Any]]] = {
    ("convergence", "quadratic"): _quadratic,
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
