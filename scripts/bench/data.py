"""Measures the data path, one question per process, with one thread.

python scripts/bench/data.py partition SCHEME
    {"seconds": the time to assign 60,000 samples to 10,000 clients, after the imports}
python scripts/bench/data.py client
    {"ms": the time to gather a client's 500 images of 32x32x3 and prepare them for the model}
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch
from harness import answer, timed

from fedhet.core.task import Samples, Task
from fedhet.core.workspace import Workspace
from fedhet.data.dataset import Dataset
from fedhet.data.federation import FederatedData, transform
from fedhet.data.partition import Partition
from fedhet.runs import config
from fedhet.runs.config.instantiation import instantiate

MEAN = (0.5, 0.5, 0.5)
STD = (0.25, 0.25, 0.25)
CLASSES = tuple(map(str, range(10)))
IMAGES = 500  # the images of one client
Figures = dict[str, float]


def partition(name: str) -> Figures:
    """Measure the time of a partition scheme."""
    samples = 60_000
    clients = 10_000
    draw = np.random.default_rng(0)
    labels = draw.permutation(np.arange(samples) % 10)
    owners = draw.permutation(np.arange(samples) % clients)
    overrides = [f"partition={name}", f"partition.clients={clients}", "partition.min_size=0"]
    scheme = instantiate(config.compose(overrides).cfg.partition)
    began = time.perf_counter()
    scheme.assign(labels, 0, owners, tuple(map(str, range(clients))))
    return {"seconds": time.perf_counter() - began}


def client() -> Figures:
    """Measure the time to prepare a client's images for the model."""
    x = torch.randint(0, 256, (10_000, 3, 32, 32), dtype=torch.uint8)
    y = torch.arange(10_000) % 10
    dataset = Dataset("random", x, y, Samples(x[:10], y[:10]), CLASSES, MEAN, STD)
    order = np.random.default_rng(0).permutation(len(x))
    indices = np.array_split(order, len(x) // IMAGES)
    clients = FederatedData(dataset, Partition("iid", indices), [1, 0, 0], 0)
    task = Task(
        model=lambda: torch.nn.Linear(1, 1),
        criterion=lambda output, y: output,
        clients=clients,
        test=None,
        classes=len(CLASSES),
        transform=transform(dataset),
        sizes=clients.sizes,
    )
    workspace = Workspace(task, device=torch.device("cpu"), seed=0)
    times = timed({"ready": lambda: workspace.prepared(clients[0].train)}, 100)
    return {"ms": statistics.median(times["ready"]) * 1000}


if __name__ == "__main__":
    torch.set_num_threads(1)
    answer(partition, client)
