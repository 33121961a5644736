"""What the tests of FedGMM share: three clients with few samples of some classes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedhet.core.task import ClientData, Task

KEPT, GENERATED, GLOBAL_MAX = "fedgmm.samples", "fedgmm.generated", "fedgmm.global_max"
CLASSES = 4
SHAPE = (1, 2, 2)
LR = 0.5
PSI = 0.1
REG = 1e-4
# n_ic: no client has the last class, and client 0 has one sample of class 2, too few to share.
# Larger clients have larger ids, so the order of a cohort (largest first) is the reverse of ids.
COUNTS_BY_CLIENT = np.array([[3, 0, 1, 0], [2, 5, 0, 0], [0, 6, 4, 0]])
RNG = np.random.default_rng(5)
DATA = [
    (RNG.uniform(0.1, 0.9, (n.sum(), *SHAPE)), RNG.permutation(np.repeat(np.arange(CLASSES), n)))
    for n in COUNTS_BY_CLIENT
]


class Linear(nn.Module):
    """A linear layer on the pixels, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, CLASSES, dtype=torch.float64)

    def features(self, x: Tensor) -> Tensor:
        return x.flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def criterion(output: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(output, y, reduction="none")


def normalise(x: Tensor) -> Tensor:
    return (x - 0.4) / 0.3


def task_of(data: list[tuple[np.ndarray, np.ndarray]]) -> Task:
    """A task of clients with these inputs and labels."""
    clients = [ClientData((torch.as_tensor(x), torch.as_tensor(y))) for x, y in data]
    return Task(Linear, criterion, clients, None, CLASSES, normalise)


def task(**change: Any) -> Task:
    """The task of DATA; `change` replaces the data of a client: c0=(x, y)."""
    return task_of([change.get(f"c{pid}", pair) for pid, pair in enumerate(DATA)])


def kept(run: Any, pid: int) -> dict[str, Tensor]:
    """The generated samples that a client keeps."""
    state = run.store.load(pid, run.strategy.run.versions[pid])
    return {name: state[f"{KEPT}/{name}"] for name in ("x", "y")}


def pixels(pid: int, c: int) -> np.ndarray:
    """A client's samples of a class, flattened."""
    x, y = DATA[pid]
    return x[y == c].reshape(-1, 4)
