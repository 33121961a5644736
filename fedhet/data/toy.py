"""The smallest federation: for trying whether pieces fit together, and for tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedhet import streams
from fedhet.task import ClientData, Samples, Task


class ToyModel(nn.Module):
    """Four inputs, three features, two classes; `norm` adds batch norm."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(4, 3), *([nn.BatchNorm1d(3)] if norm else []), nn.Tanh()
        )
        self.head = nn.Linear(3, 2)

    def features(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(x)
        return found

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.features(x))
        return found


def _criterion(output: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(output, y, reduction="none")


def _samples(n: int, pid: int, seed: int) -> Samples:
    draw = torch.Generator().manual_seed(streams.integer(seed, "toy", pid=pid, step=n))
    y = torch.randint(0, 2, (n,), generator=draw)
    # Inputs in [0, 1] around a point per class, shifted per client.
    x = (0.3 + 0.4 * y[:, None] + 0.05 * pid + 0.1 * torch.randn(n, 4, generator=draw)).clamp(0, 1)
    return Samples(x, y)


def toy_task(clients: int = 4, *, norm: bool = False, equal: bool = False, seed: int = 0) -> Task:
    """Client k has 12 + 4 k training samples (12 if `equal`), 5 to validate and 5 to test."""
    sizes = [12 + (0 if equal else 4 * pid) for pid in range(clients)]
    data = [
        ClientData(_samples(n, pid, seed), _samples(5, pid, seed), _samples(6, pid, seed))
        for pid, n in enumerate(sizes)
    ]
    return Task(lambda: ToyModel(norm), _criterion, data, _samples(40, 1, seed + 1), 2)
