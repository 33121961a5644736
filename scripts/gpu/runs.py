"""Runs methods without configurations and run folders, and runs the plain loop for comparison."""

from __future__ import annotations

import importlib
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from fedhet.core import kernel
from fedhet.core.client.client import FedClient
from fedhet.core.groups import Evaluation, Speed
from fedhet.core.messages import LocalSettings
from fedhet.core.server.loop import Loop
from fedhet.core.server.run_setup import RunSetup
from fedhet.core.server.server_opt import FedAvgM, FedOpt, ServerOptimizer
from fedhet.core.server.strategy import FedStrategy
from fedhet.core.task import Task
from fedhet.core.trees import Tree
from fedhet.core.workspace import Workspace
from fedhet.engines.fused.clients import FusedTransport
from fedhet.engines.local_transport import LocalTransport
from fedhet.methods.fedavg import FedAvg
from fedhet.runs.stores import MemoryStore

sys.path.append(str(Path(__file__).parents[1] / "bench"))
import floor as plain_loop

CONF = Path(__file__).parents[2] / "conf" / "method"
SERVERS: dict[str, ServerOptimizer] = {
    "fedavgm": FedAvgM(),
    **{f"fed{kind}": FedOpt(kind=kind) for kind in ("adagrad", "adam", "yogi")},
}
# Phases before the training, and training on the server, take long by default.
DENSITY = {"made_max_rounds": 2, "local_max_epochs": 2, "clf_max_epochs": 2}
SHORT_PLUGINS = {"feddisk": DENSITY, "feddiskab": DENSITY, "fedlex": {"e_exp": 2}}
SHORT_METHODS = {"fedgen": {"server_steps": 5, "hidden": 8, "noise_dim": 4}}


@dataclass(frozen=True)
class Components:
    """The components of a run."""

    method: kernel.Method = field(default_factory=FedAvg)
    plugins: Sequence[kernel.Plugin] = ()
    server_opt: ServerOptimizer | None = None


def methods() -> Iterator[tuple[str, Components]]:
    """Yield all methods of conf/ by name: default settings, short phases before the training."""
    for path in sorted(CONF.glob("*.yaml")):
        found = re.search(r"_target_: (fedhet\.methods\S*)\.(\w+)", path.read_text())
        assert found is not None
        name, cls = path.stem, getattr(importlib.import_module(found[1]), found[2])
        plugins = [cls.requires(**SHORT_PLUGINS.get(name, {}))] if cls.requires else []
        yield name, Components(cls(**SHORT_METHODS.get(name, {})), plugins, SERVERS.get(name))


def run(
    task: Task,
    device: torch.device,
    local: LocalSettings,
    components: Components,
    *,
    rounds: int,
    fused: int = 0,
    fraction: float = 1.0,
    amp: bool = False,
    evaluates: bool = False,
    most_seconds: float = float("inf"),
) -> tuple[dict[str, Tree], list[float]]:
    """Run a method; no step begins after `most_seconds`.

    Returns:
        All weights of the server, and the seconds of each step.
    """
    workspace = Workspace(
        task,
        device=device,
        seed=0,
        scope=components.method.scope,
        evaluation=Evaluation(every=rounds),
        speed=Speed(amp=amp),
    )
    setup = RunSetup(
        workspace,
        local,
        [*components.plugins],
        components.server_opt,
        rounds=rounds,
        fraction=fraction,
    )
    strategy = FedStrategy(setup, components.method)
    store = MemoryStore()
    make = partial(FedClient, workspace, components.method, [*components.plugins], store)
    transport = LocalTransport(make, store)
    if fused:
        transport = together = FusedTransport(make, store, fused)
        workspace.batcher = together.batcher
    loop = Loop(strategy, evaluates=evaluates)
    loop.transport = transport
    steps = loop.steps()
    seconds: list[float] = []
    request = next(steps)
    began = moment = time.perf_counter()
    while request is not None and moment - began < most_seconds:
        try:
            request = steps.send(transport.exchange(*request))
        except StopIteration:
            request = None
        wait(device)
        seconds.append(time.perf_counter() - moment)
        moment += seconds[-1]
    return strategy.weights, seconds


def wait(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def floor(
    task: Task, device: torch.device, local: LocalSettings, clients: Sequence[int], *, amp: bool
) -> float:
    """Return the seconds that a plain loop with resident images needs for the clients' steps."""
    model = task.build().to(device)
    x = [p.detach().clone() for p in model.parameters()]
    samples = [task.clients[pid].train.to(device) for pid in clients]
    ready = [(part.x.float().div_(255), part.y) for part in samples]
    total = [torch.zeros_like(t) for t in x]

    wait(device)
    began = time.perf_counter()
    with torch.autocast(device.type, torch.bfloat16) if amp else nullcontext():
        plain_loop.train(
            model,
            x,
            ready,
            total,
            local.batch_size,
            local.lr,
            share=1 / len(samples),
            epochs=local.epochs,
        )
    wait(device)
    return time.perf_counter() - began
