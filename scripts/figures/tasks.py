"""Data that no override can define: functions from the configured task to the task that is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from fedhet.core.task import ClientData, Samples, Task

CONTRASTS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda p: p,
    lambda p: 1 - p,
    lambda p: 0.3 * p,
    lambda p: 0.3 * p + 0.7,
    lambda p: p**3,
    lambda p: 1 - p**3,
]


def contrasts(task: Task) -> Task:
    """Give each client's images another contrast, in its training, validation and test data."""
    clients = []
    for change, client in zip(CONTRASTS, task.clients, strict=True):
        parts = (client.train, client.val, client.test)
        clients.append(ClientData(*(part and Samples(change(part.x), part.y) for part in parts)))
    return replace(task, clients=clients)


def inverted(task: Task) -> Task:
    """Invert the first (k + .5) / K of the images of client k of K; test on both kinds."""
    clients = []
    for k, client in enumerate(task.clients):
        x = client.train.x.clone()
        count = round((k + 0.5) / len(task.clients) * len(x))
        x[:count] = 1 - x[:count]
        clients.append(ClientData(Samples(x, client.train.y)))
    assert task.test is not None
    test = Samples(torch.cat([task.test.x, 1 - task.test.x]), task.test.y.repeat(2))
    return replace(task, clients=clients, test=test)
