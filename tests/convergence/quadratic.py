"""Clients whose losses are quadratic in one weight w, so that the limit of a method is known.

Client i has the loss a_i/2 (w - b_i)^2. `quadratic` is the task, and `final_weight` what a
configured run makes of it with the real strategy and client classes.
"""

from __future__ import annotations

import io
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from fedhet.core.client.context import ClientContext
from fedhet.core.kernel import Message, Plugin, State, Term
from fedhet.core.task import ClientData, Samples, Task
from fedhet.engines import in_process as local
from fedhet.runs import config
from fedhet.runs.config.validation import validate
from fedhet.runs.job import Job
from fedhet.runs.record.outcome import load_run


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
    """Client i has one sample, whose loss is a_i/2 (w - b_i)^2; w starts at `w0`."""

    def criterion(output: Tensor, y: Tensor) -> Tensor:
        return y[:, 0] / 2 * (output[:, 0] - y[:, 1]) ** 2

    clients = []
    for pair in zip(a, b, strict=True):
        x = torch.ones(1, 1, dtype=torch.float64)
        y = torch.tensor([pair], dtype=torch.float64)
        clients.append(ClientData(Samples(x, y)))
    return Task(lambda: Scalar(w0), criterion, clients, None, target="loss")


@dataclass(frozen=True)
class LocalSteps(Plugin):
    """Client i trains for steps[i] epochs, with one batch each.

    No function of a plug-in changes the number of steps of one client only, so that it reaches into
    the client.
    """

    name = "local_steps"

    steps: list[int]

    def data(self, samples: Samples, state: State) -> Samples:
        """The server then knows no client's number of steps."""
        return samples

    def terms(self, msg: Message, state: State, ctx: ClientContext) -> list[Term]:
        local = replace(ctx._msg.local, epochs=self.steps[msg.pid])
        ctx._msg = replace(ctx._msg, local=local)
        return []


@dataclass
class QuadraticJob(Job):
    """A configured run with further plug-ins."""

    further: list[Plugin] = field(default_factory=list)

    @cached_property
    def plugins(self) -> list[Plugin]:
        return [*super().plugins, *self.further]


def final_weight(
    *,
    a: list[float],
    b: list[float],
    steps: int | list[int],
    lr: float,
    method: str,
    rounds: int,
    plugins: list[str] | None = None,
    fraction: float = 1.0,
    seed: int = 0,
    w0: float = 0.0,
    method_args: dict[str, Any] | None = None,
) -> float:
    """The weight w after a run in the in-process engine.

    Args:
        a, b: each client's loss is a/2 (w - b)^2.
        steps: the local steps, or those of each client.
        lr: the local learning rate.
        method: the method's name.
        rounds: training rounds.
        plugins: names of plug-ins.
        fraction: the share of the clients in each round.
        seed: the run's seed.
        w0: where w starts.
        method_args: options of the method, its plug-ins or its server optimiser, with or without
            the group they belong to ("mu" or "plugin.fedprox.mu").
    """
    # Composing takes longer than training, so a configuration is shared by many cases.
    composed = config.cached((f"method={method}", f"plugin=[{','.join(plugins or [])}]"))
    cfg = composed.cfg.copy()
    OmegaConf.set_readonly(cfg, False)
    settings = {
        "rounds": rounds,
        "fraction": fraction,
        "seed": seed,
        "device": "cpu",
        "client.lr": lr,
        "client.epochs": steps if isinstance(steps, int) else 1,
        "client.batch_size": 1,
        "eval.every": rounds,
        "eval.clients": False,
    }
    settings |= {_option(cfg, key): value for key, value in (method_args or {}).items()}
    for key, value in settings.items():
        OmegaConf.update(cfg, key, value)
    validate(cfg)
    further: list[Plugin] = [] if isinstance(steps, int) else [LocalSteps(steps)]
    with (
        tempfile.TemporaryDirectory() as home,
        redirect_stdout(io.StringIO()),
        redirect_stderr(io.StringIO()),
    ):
        run = replace(composed, cfg=cfg, run_dir=f"{home}/run")
        job = QuadraticJob(run, quadratic(a, b, w0), further=further)
        return float(load_run(local.run(job)).weights["w"])


def _option(cfg: DictConfig, key: str) -> str:
    """The full key of an option of the method, of a plug-in or of the server optimiser."""
    if "." in key:
        return key
    groups = {f"plugin.{name}": options for name, options in cfg.plugin.items()}
    groups = {"method": cfg.method, **groups, "server_opt": cfg.server_opt}
    for group, options in groups.items():
        if key in options:
            return f"{group}.{key}"
    return f"method.{key}"
