"""Runs of methods without configurations and run folders, and the plain loop beside them."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from fedhet.core import kernel
from fedhet.core.client.client import FedClient
from fedhet.core.groups import Evaluation, Speed
from fedhet.core.messages import LocalSettings
from fedhet.core.server.loop import Loop
from fedhet.core.server.server_opt import FedAvgM, FedOpt, ServerOptimizer
from fedhet.core.server.setting import Setting
from fedhet.core.server.strategy import FedStrategy
from fedhet.core.task import Task
from fedhet.core.trees import Tree
from fedhet.core.workspace import Workspace
from fedhet.engines.couriers import LocalCourier
from fedhet.engines.fused.clients import FusedCourier
from fedhet.methods.fedavg import FedAvg
from fedhet.runs.stores import MemoryStore

CONF = Path(__file__).parents[2] / "conf" / "method"
SERVERS: dict[str, Callable[[], ServerOptimizer]] = {
    "fedavgm": FedAvgM,
    **{f"fed{kind}": partial(FedOpt, kind=kind) for kind in ("adagrad", "adam", "yogi")},
}
# Phases before the training and training on the server take long by default.
DENSITY = {"made_max_rounds": 2, "local_max_epochs": 2, "clf_max_epochs": 2}
SHORT_PLUGINS = {"feddisk": DENSITY, "feddiskab": DENSITY, "fedlex": {"e_exp": 2}}
SHORT_METHODS = {"fedgen": {"server_steps": 5, "hidden": 8, "noise_dim": 4}}


@dataclass
class Method:
    """A method with its defaults.

    Attributes:
        cls: its class.
        options: its own options.
        plugin: those of the plug-in that it requires.
        server_opt: makes the server's optimiser; None for none.
    """

    cls: type[kernel.Method] = FedAvg
    options: dict[str, Any] = field(default_factory=dict)
    plugin: dict[str, Any] = field(default_factory=dict)
    server_opt: Callable[[], ServerOptimizer] | None = None

    def plugins(self) -> list[kernel.Plugin]:
        """The plug-ins."""
        required = self.cls.requires
        return [required(**self.plugin)] if required else []


def methods() -> Iterator[tuple[str, Method]]:
    """All methods of conf/ by name, with short phases before the training."""
    for path in sorted(CONF.glob("*.yaml")):
        found = re.search(r"_target_: (fedhet\.methods\S*)\.(\w+)", path.read_text())
        assert found is not None
        name, cls = path.stem, getattr(importlib.import_module(found[1]), found[2])
        short = SHORT_METHODS.get(name, {}), SHORT_PLUGINS.get(name, {})
        yield name, Method(cls, *short, SERVERS.get(name))


@dataclass
class Outcome:
    """What a run gives.

    Attributes:
        weights: all weights of the server.
        seconds: of each step.
    """

    weights: dict[str, Tree]
    seconds: list[float]


def run(
    task: Task,
    device: torch.device,
    local: LocalSettings,
    method: Method,
    *,
    rounds: int,
    fused: int = 0,
    fraction: float = 1.0,
    amp: bool = False,
    evaluates: bool = False,
    most_seconds: float = float("inf"),
) -> Outcome:
    """Run a method; no step begins after `most_seconds`."""
    workspace = Workspace(
        task,
        device=device,
        seed=0,
        scope=method.cls.scope,
        evaluation=Evaluation(every=rounds),
        speed=Speed(amp=amp),
    )
    server_opt = method.server_opt() if method.server_opt else None
    server_half, plugins = method.cls(**method.options), method.plugins()
    setting = Setting(workspace, local, plugins, server_opt, rounds=rounds, fraction=fraction)
    strategy = FedStrategy(setting, server_half)
    store = MemoryStore()

    def make() -> FedClient:
        return FedClient(workspace, server_half, plugins, store)

    courier = LocalCourier(make, store)
    if fused:
        courier = together = FusedCourier(make, store, fused)
        workspace.performer = together.performer
    loop = Loop(strategy, evaluates=evaluates)
    loop.courier = courier
    steps = loop.steps()
    seconds: list[float] = []
    request = next(steps)
    began = moment = time.perf_counter()
    while moment - began < most_seconds:
        try:
            request = steps.send(courier.exchange(*request))
        except StopIteration:
            request = None
        wait(device)
        seconds.append(time.perf_counter() - moment)
        moment += seconds[-1]
        if request is None:
            break
    return Outcome(strategy.weights, seconds)


def wait(device: torch.device) -> None:
    """Wait for what a GPU has been asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def floor(
    task: Task, device: torch.device, local: LocalSettings, clients: Sequence[int], *, amp: bool
) -> float:
    """Seconds of the local steps of these clients by a plain loop with resident images."""
    model = task.build().to(device)
    params = list(model.parameters())
    buffers = [torch.zeros_like(p) for p in params]
    start = [p.detach().clone() for p in params]
    data = [task.clients[pid].train.to(device) for pid in clients]
    total = [torch.zeros_like(p) for p in params]
    wait(device)
    began = time.perf_counter()
    for samples in data:
        with torch.no_grad():
            torch._foreach_copy_(params, start)
            torch._foreach_zero_(buffers)
        for _ in range(local.epochs):
            order = torch.randperm(len(samples)).to(device, non_blocking=True)
            for rows in order.split(local.batch_size):
                x = samples.x.index_select(0, rows).float().div_(255)
                if task.transform is not None:
                    x = task.transform(x)
                with torch.autocast(device.type, torch.bfloat16) if amp else nullcontext():
                    output = model(x)
                    loss = functional.cross_entropy(output, samples.y.index_select(0, rows))
                with torch.no_grad():
                    grads = list(torch.autograd.grad(loss, params))
                    if local.momentum:
                        torch._foreach_mul_(buffers, local.momentum)
                        torch._foreach_add_(buffers, grads)
                        grads = buffers
                    torch._foreach_add_(params, grads, alpha=-local.lr)
        with torch.no_grad():
            torch._foreach_add_(total, params, alpha=1 / len(data))
    wait(device)
    return time.perf_counter() - began
