"""A tiny federation, for tests and to try whether methods and plug-ins fit together."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedhet.core import streams
from fedhet.core.targets import cross_entropy
from fedhet.core.task import ClientData, Samples, Task


class ToyModel(nn.Module):
    """A network with four inputs, three features and two classes.

    Args:
        norm: whether to add batch norm.
    """

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(4, 3)]
        if norm:
            layers.append(nn.BatchNorm1d(3))
        self.body = nn.Sequential(*layers, nn.Tanh())
        self.head = nn.Linear(3, 2)

    def features(self, x: Tensor) -> Tensor:
        """Return the input of the head: x (B, 4) -> (B, 3)."""
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def _samples(n: int, pid: int, seed: int) -> Samples:
    draw = torch.Generator().manual_seed(streams.integer(seed, "toy", pid=pid, step=n))
    y = torch.randint(0, 2, (n,), generator=draw)
    # Inputs in [0, 1] scatter around one point per class, which is shifted for each client.
    x = (0.3 + 0.4 * y[:, None] + 0.05 * pid + 0.1 * torch.randn(n, 4, generator=draw)).clamp(0, 1)
    return Samples(x, y)


def toy_task(clients: int = 4, *, norm: bool = False, equal: bool = False, seed: int = 0) -> Task:
    """Return a task in which client k has 12 + 4 k training samples.

    Each client also has 5 validation and 6 test samples.

    Args:
        clients: the number of clients.
        norm: whether the model has batch norm.
        equal: whether all clients have 12 training samples instead.
        seed: the seed of the data.
    """
    sizes = [12 + (0 if equal else 4 * pid) for pid in range(clients)]
    data = [
        ClientData(_samples(n, pid, seed), _samples(5, pid, seed), _samples(6, pid, seed))
        for pid, n in enumerate(sizes)
    ]
    return Task(lambda: ToyModel(norm), cross_entropy, data, _samples(40, 1, seed + 1), 2)
