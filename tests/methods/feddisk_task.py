"""What the tests of FedDisk share: short settings, tasks, and what a client keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from methods.readouts import place
from torch import Tensor
from torch.nn import functional

from fedhet.core.client.context import ClientContext
from fedhet.core.kernel import Plugin
from fedhet.core.task import ClientData, Samples, Task
from fedhet.data.toy import ToyModel
from fedhet.methods.feddisk import FedDiskPlugin

Make = Callable[..., Any]

SHORT = {"hidden": 8, "made_max_rounds": 3, "local_max_epochs": 4, "clf_max_epochs": 4}
LINES = [f"plugin.feddisk.{name}={value}" for name, value in SHORT.items()]
COMMON = [
    "seed=1",
    "privacy.min_count=0",  # the toy has too few samples for the default
    "rounds=2",
    "client.epochs=2",
    "client.batch_size=5",
    "client.lr=0.1",
    "eval.every=2",
    "eval.clients=false",
]
TRAINED = {
    "hidden": 20,
    "made_lr": 0.01,
    "made_max_rounds": 40,
    "local_max_epochs": 200,
    "clf_max_epochs": 200,
    "clf_lr": 0.1,
}


def plugins(**options: Any) -> Callable[[], list[Plugin]]:
    """Makes the plug-in with SHORT and these options."""
    return lambda: [FedDiskPlugin(**{**SHORT, **options})]


def criterion(output: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(output, y, reduction="none")


def task_of(*inputs: Tensor, model: type = ToyModel) -> Task:
    """Clients with these inputs (n, D) in [0, 1], and labels that the first input decides."""
    clients = [ClientData(Samples(x, (x[:, 0] > 0.5).long())) for x in inputs]
    return Task(model, criterion, clients, None, 2)


def kinds(n_first: int, n_second: int, seed: int) -> Tensor:
    """(n, 4): samples of two kinds, near (.9, .9, .9, .1) and (.1, .1, .1, .9)."""
    draws = torch.Generator().manual_seed(seed)
    centre = torch.tensor([[0.9, 0.9, 0.9, 0.1]] * n_first + [[0.1, 0.1, 0.1, 0.9]] * n_second)
    return (centre + 0.05 * torch.randn(centre.shape, generator=draws)).clamp(0, 1)


def kept(run: Any, pid: int) -> Tensor:
    """The sample weights that a client keeps."""
    return run.store.load(pid, run.strategy.run.versions[pid])["feddisk.w/w"]


def phases(run: Any) -> dict[str, int]:
    """The phases of the timetable with their numbers of steps."""
    return {entry.name: entry.rounds for entry in run.strategy.timetable}


def ctx(run: Any, pid: int) -> ClientContext:
    """A client's place in the first step of a run."""
    msg = next(msg for msg in run.strategy.plan(1).messages if msg.pid == pid)
    return place(run, msg, run.strategy.plugins[0])[2]
