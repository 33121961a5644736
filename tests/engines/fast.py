"""What the tests of options that make local steps faster share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedhet.core.task import ClientData, Samples, Task
from fedhet.models import CNN

COMMON = [
    "rounds=3",
    "fraction=0.75",
    "client.epochs=2",
    "client.batch_size=5",
    "client.lr=0.1",
    "eval.clients=false",
    "seed=1",
]
LOCAL = ["client.momentum=0.5", "client.weight_decay=0.01", "client.clip=0.3"]
DENSITY = [
    f"plugin.feddisk.{key}=2" for key in ("made_max_rounds", "local_max_epochs", "clf_max_epochs")
]


def images(**how: Any) -> Task:
    """Small grey images for a convolutional model; the clients' sizes differ."""
    draw = torch.Generator().manual_seed(0)
    clients = []
    for n in (7, 13, 10):
        x = torch.rand(n, 1, 8, 8, generator=draw)
        y = torch.randint(3, (n,), generator=draw)
        clients.append(ClientData(Samples(x, y)))
    return Task(
        model=lambda: CNN(shape=(1, 8, 8), classes=3),
        criterion=nn.CrossEntropyLoss(reduction="none"),
        clients=clients,
        test=None,
        classes=3,
        **how,
    )


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)
