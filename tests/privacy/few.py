"""Clients with few samples of some classes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from fedhet.core.task import ClientData, Samples, Task

LEAST = 5
COUNTS = ((4, 5, 9), (5, 4, 4), (2, 1, 1), (8, 8, 8))  # of clients 0 to 3


class Net(nn.Module):
    """Four inputs, three features, three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.head = nn.Linear(3, 3)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).tanh()  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))  # type: ignore[no-any-return]


def few(counts: Sequence[Sequence[int]] = COUNTS) -> Task:
    """A task whose clients have these numbers of samples of each class, with inputs in [0, 1]."""
    clients = []
    for pid, numbers in enumerate(counts):
        draws = torch.Generator().manual_seed(pid)
        y = torch.arange(len(numbers)).repeat_interleave(torch.tensor(numbers))
        clients.append(ClientData(Samples(torch.rand(len(y), 4, generator=draws), y)))
    return Task(
        Net, lambda out, y: functional.cross_entropy(out, y, reduction="none"), clients, None, 3
    )
