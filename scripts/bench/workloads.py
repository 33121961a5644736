"""The workloads of the benchmarks: the same samples, models, cohorts and settings for all systems.

There are 60,000 synthetic, MNIST-like samples (784 floats, ten classes), sorted by label into 200
shards of 300, two for each of 100 clients (McMahan's pathological split). `cohort` draws ten
clients for each round. They train with SGD at rate .05 for one local epoch. Nothing is evaluated in
a timed round.

    W1   the 2NN 784-200-200-10, batches of 10: 600 steps of little arithmetic; they show the cost
         of the framework
    W2   the CNN of McMahan et al. (1,663,370 parameters), batches of 50: 120 steps that are nearly
         all arithmetic

"W1-norm" is W1 with batch norm before each ReLU, for FedBN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

SAMPLES = 60_000
SHARDS = 200
CLIENTS = 100
COHORT = 10
LR = 0.05
CLASSES = 10
Data = list[tuple[Tensor, Tensor]]


class Net(nn.Module):
    """Layers and a head, with the features between them."""

    def __init__(self, head: nn.Linear, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)
        self.head = head

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def two_nn(*norms: nn.Module) -> Net:
    """Return the 2NN; `norms` are the layers before its two ReLUs."""
    first, second = nn.Linear(784, 200), nn.Linear(200, 200)
    layers = first, *norms[:1], nn.ReLU(), second, *norms[1:], nn.ReLU()
    return Net(nn.Linear(200, CLASSES), *layers)


def cnn() -> Net:
    """Return the CNN of McMahan et al. for MNIST."""
    layers = (
        nn.Conv2d(1, 32, 5, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(3136, 512),
        nn.ReLU(),
    )
    return Net(nn.Linear(512, CLASSES), *layers)


@dataclass(frozen=True)
class Workload:
    """A model and its training settings.

    Attributes:
        model: builds the model.
        shape: the shape of a sample.
        batch: samples per batch.
        rounds: the number of timed rounds; one untimed round comes before them.
    """

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int
    rounds: int


WORKLOADS = {
    "W1": Workload(two_nn, (784,), batch=10, rounds=10),
    "W2": Workload(cnn, (1, 28, 28), batch=50, rounds=3),
    "W1-norm": Workload(
        lambda: two_nn(nn.BatchNorm1d(200), nn.BatchNorm1d(200)), (784,), batch=10, rounds=10
    ),
}


def synthetic() -> tuple[Tensor, Tensor]:
    """Return x (60000, 784) float32 and y (60000,), sorted by label."""
    rng = np.random.default_rng(0)
    y = np.sort(rng.permutation(np.arange(SAMPLES) % CLASSES))
    prototypes, x = (rng.standard_normal((n, 784), dtype=np.float32) for n in (CLASSES, SAMPLES))
    by_class = x.reshape(CLASSES, -1, 784)
    by_class += 0.5 * prototypes[:, None]
    return torch.from_numpy(x), torch.from_numpy(y)


def data(workload: Workload, clients: int = CLIENTS) -> Data:
    """Return (x, y) of every client: copies of two shards of the sorted samples."""
    x, y = synthetic()
    order = np.random.default_rng(1).permutation(2 * clients)
    shards = np.arange(SAMPLES).reshape(2 * clients, -1)[order]
    parts = torch.from_numpy(shards.reshape(clients, -1))
    return [(x[part].reshape(-1, *workload.shape), y[part]) for part in parts]


def cohort(number: int) -> list[int]:
    """Return the clients of round `number`, counted from 1."""
    draw = np.random.RandomState(1000 + number)
    return [int(k) for k in draw.choice(CLIENTS, COHORT, replace=False)]
