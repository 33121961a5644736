"""What the benchmarks train: the same samples, models, cohorts and settings for every system.

There are 60,000 synthetic, MNIST-like samples (784 floats, ten classes), sorted by label into 200
shards of 300, two for each of 100 clients (McMahan's pathological split). Ten clients, drawn by
`cohort`, take part in each round, with SGD at rate .05 and one local epoch. Nothing is evaluated in
a timed round.

    W1   the 2NN 784-200-200-10, batches of 10: 600 steps of little arithmetic,
         which show what the framework costs
    W2   the CNN of McMahan et al. (1,663,370 parameters), batches of 50:
         120 steps that are nearly all arithmetic

"W1-norm" is W1 with batch norm before each ReLU, for FedBN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

SAMPLES = 60_000
SHARDS = 200
CLIENTS = 100
COHORT = 10
LR = 0.05
CLASSES = 10
Data = list[tuple[Tensor, Tensor]]


class TwoNN(nn.Module):
    """The 2NN; `norms` are the layers before its two ReLUs."""

    def __init__(self, *norms: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(784, 200), *norms[:1], nn.ReLU(), nn.Linear(200, 200), *norms[1:], nn.ReLU()
        )
        self.head = nn.Linear(200, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class CNN(nn.Module):
    """The CNN of McMahan et al. for MNIST."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
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
        self.head = nn.Linear(512, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def _normed_two_nn() -> TwoNN:
    return TwoNN(nn.BatchNorm1d(200), nn.BatchNorm1d(200))


@dataclass(frozen=True)
class Workload:
    """A model and how it is trained.

    Attributes:
        model: builds the model.
        shape: the shape of a sample.
        batch: samples per batch.
        rounds: the number of timed rounds, which follow one that is not timed.
    """

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int
    rounds: int


WORKLOADS = {
    "W1": Workload(TwoNN, (784,), batch=10, rounds=10),
    "W2": Workload(CNN, (1, 28, 28), batch=50, rounds=3),
    "W1-norm": Workload(_normed_two_nn, (784,), batch=10, rounds=10),
}


def synthetic() -> tuple[Tensor, Tensor]:
    """x (60000, 784) float32 and y (60000,), sorted by label."""
    rng = np.random.default_rng(0)
    y = np.sort(rng.permutation(np.arange(SAMPLES) % CLASSES))
    prototypes, x = (rng.standard_normal((n, 784), dtype=np.float32) for n in (CLASSES, SAMPLES))
    by_class = x.reshape(CLASSES, -1, 784)
    by_class += 0.5 * prototypes[:, None]
    return torch.from_numpy(x), torch.from_numpy(y)


def parts(clients: int = CLIENTS) -> list[Tensor]:
    """The samples of each client: two shards of the sorted ones."""
    order = np.random.default_rng(1).permutation(2 * clients)
    shards = np.arange(SAMPLES).reshape(2 * clients, -1)[order]
    return list(torch.from_numpy(shards.reshape(clients, -1)))


def data(workload: Workload, clients: int = CLIENTS) -> Data:
    """(x, y) of every client, copied from the whole."""
    x, y = synthetic()
    return [(x[part].reshape(-1, *workload.shape), y[part]) for part in parts(clients)]


def cohort(number: int) -> list[int]:
    """The clients of round `number`, which counts from 1."""
    draw = np.random.RandomState(1000 + number)
    return [int(k) for k in draw.choice(CLIENTS, COHORT, replace=False)]


def criterion(output: Tensor, y: Tensor) -> Tensor:
    """Per-sample losses, as a `fedhet.Task` expects them."""
    return functional.cross_entropy(output, y, reduction="none")


@torch.no_grad()
def accuracy(model: nn.Module, samples: Data) -> float:
    """The share of all samples that the model classifies correctly."""
    correct = sum(int((model(x).argmax(1) == y).sum()) for x, y in samples)
    return correct / sum(len(y) for _, y in samples)
