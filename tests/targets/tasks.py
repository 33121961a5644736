"""Small tasks whose targets are numbers or sets of labels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedhet.core import targets
from fedhet.core.task import ClientData, Samples, Task

INPUTS = 4
OUTPUTS = 3
SIZES = (16, 20, 24, 28)


class Net(nn.Module):
    """A network with features(x) and a linear head, as methods ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(INPUTS, 8), nn.Tanh())
        self.head = nn.Linear(8, OUTPUTS)

    def features(self, x: Tensor) -> Tensor:
        z: Tensor = self.body(x)
        return z

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.features(x))
        return output


def samples(target: str, n: int, pid: int) -> Samples:
    """Inputs in [0, 1], as density estimates need them, and a linear function of them."""
    draw = torch.Generator().manual_seed(1000 * pid + n)
    slopes = torch.randn(INPUTS, OUTPUTS, generator=torch.Generator().manual_seed(1))
    x = (0.5 + 0.05 * pid + 0.3 * torch.randn(n, INPUTS, generator=draw)).clamp(0, 1)
    y = (x - 0.5) @ slopes + 0.05 * torch.randn(n, OUTPUTS, generator=draw)
    return Samples(x, y if target == "number" else (y > 0).float())


def task_of(target: str) -> Task:
    """A task of this target with four clients."""
    clients = [
        ClientData(*(samples(target, size, pid) for size in (n, 7, 9)))
        for pid, n in enumerate(SIZES)
    ]
    classes = OUTPUTS if target == "labels" else 0
    criterion = targets.make(target, OUTPUTS).losses
    test = samples(target, 40, 9)
    return Task(Net, criterion, clients, test, classes, target=target)
