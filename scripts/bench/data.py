"""What the data path costs, one question per process, with one thread and an empty cache.

    python scripts/bench/data.py partition SCHEME
        {"seconds": to assign 60,000 samples to 10,000 clients, after the imports}
    python scripts/bench/data.py client
        {"ms": a client's 500 images of 32x32x3, gathered and made ready for the model;
        "torchvision", "huggingface": the same through the usual transforms}
    python scripts/bench/data.py mnist
        {"seconds": to load 60,000 + 10,000 images and touch each pixel,
        "memory": peak beyond the imports / size of the images}
    python scripts/bench/data.py latents
        {"passes": FedNorm's latents, in inference passes over the client's data}

The images are random numbers in the published layout. `torchvision`: ToTensor and Normalize image
by image in a DataLoader, as its CIFAR10 does; `huggingface`: the same through with_transform on a
dataset of images, as in Flower's quickstarts.
"""

from __future__ import annotations

import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import torch
import workloads
from harness import answer, timed
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.transforms import Compose, Normalize, ToTensor

from fedhet.core.client.client import FedClient
from fedhet.core.client.site import Fitted
from fedhet.core.groups import LocalSettings
from fedhet.core.owners import seen_message
from fedhet.core.server.setting import Setting
from fedhet.core.server.strategy import FedStrategy
from fedhet.core.task import ClientData, Samples, Task
from fedhet.core.workspace import Workspace
from fedhet.data import images  # noqa: F401 -- imports must not count as memory of the data
from fedhet.data.dataset import Dataset
from fedhet.data.federation import FederatedData, transform
from fedhet.data.partition import Partition
from fedhet.methods.fednorm import FedNorm, FedNormPlugin
from fedhet.runs import config
from fedhet.runs.config.instantiation import instantiate
from fedhet.runs.stores import MemoryStore

MEAN = (0.5, 0.5, 0.5)
STD = (0.25, 0.25, 0.25)
CLASSES = tuple(map(str, range(10)))
IMAGES = 500  # of one client
BATCH = 50
Figures = dict[str, float]


def partition(name: str) -> Figures:
    """The time that a partition scheme takes."""
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
    """The time that a client's images take on their way to the model."""
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
    return {
        "ms": _ms(lambda: workspace.prepared(clients[0].train), 100),
        **_usual_pipelines(x[:IMAGES].permute(0, 2, 3, 1).numpy(), y[:IMAGES].tolist()),
    }


def _usual_pipelines(x: np.ndarray, y: list[int]) -> Figures:
    """The same 500 images once through the usual pipelines; x (n, H, W, C) uint8."""
    apply = Compose([ToTensor(), Normalize(MEAN, STD)])
    pairs = [(Image.fromarray(image), label) for image, label in zip(x, y, strict=True)]
    features = datasets.Features({"img": datasets.Image(), "label": datasets.Value("int64")})
    columns = {"img": [image for image, _ in pairs], "label": y}
    hugging = datasets.Dataset.from_dict(columns, features=features).with_transform(
        lambda batch: {**batch, "img": [apply(image) for image in batch["img"]]}
    )
    torchvision = DataLoader(
        pairs, BATCH, collate_fn=lambda batch: [(apply(image), label) for image, label in batch]
    )
    return {
        "torchvision": _ms(lambda: list(torchvision), 5),
        "huggingface": _ms(lambda: list(DataLoader(hugging, BATCH)), 5),
    }


def _ms(work: Callable[[], object], reps: int) -> float:
    return statistics.median(timed({"": work}, reps)[""]) * 1000


def latents() -> Figures:
    """FedNorm's time relative to that of a plain pass, the median over ten clients."""
    w1 = workloads.WORKLOADS["W1"]
    samples = workloads.data(w1)[: workloads.COHORT]
    clients = [ClientData(Samples(*pair)) for pair in samples]
    task = Task(
        model=w1.model, criterion=workloads.criterion, clients=clients, test=None, classes=10
    )
    workspace = Workspace(task, device=torch.device("cpu"), seed=0)
    plugin, method = FedNormPlugin(), FedNorm()
    strategy = FedStrategy(Setting(workspace, LocalSettings(lr=0.1), [plugin], rounds=1), method)
    client = FedClient(workspace, method, [plugin], MemoryStore())
    fitted = Fitted(workspace.initial, 0, {}, workspace.initial)
    ratios = []
    for msg in strategy.plan(1).messages:
        client.receive(msg)
        seen = seen_message(plugin.name, msg, client.complete())
        x, _ = samples[msg.pid]
        pieces = {
            "latents": lambda seen=seen: plugin.finish(seen, {}, client.site, fitted),
            "pass": lambda x=x: workspace.model(x),
        }
        times = timed(pieces, 5, time.process_time)
        ratios.append(min(times["latents"]) / min(times["pass"]))
    return {"passes": statistics.median(ratios)}


def mnist() -> Figures:
    """The time and the memory that loading a full-size MNIST takes."""
    cfg = config.compose(["dataset=mnist"]).cfg.dataset
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder, "MNIST", "raw")
        raw.mkdir(parents=True)
        for part, n in (("train", 60_000), ("t10k", 10_000)):
            _write_idx(raw / f"{part}-images-idx3-ubyte", (n, 28, 28), 256)
            _write_idx(raw / f"{part}-labels-idx1-ubyte", (n,), 10)
        before = _peak_bytes()
        began = time.perf_counter()
        dataset = instantiate(cfg, data_dir=folder)
        highest = max(int(part.max()) for part in (dataset.x, dataset.test.x))
        seconds = time.perf_counter() - began
        if highest != 255:
            raise SystemExit(f"the highest pixel is {highest}, not 255")
        size = dataset.x.nbytes + dataset.test.x.nbytes
        return {"seconds": seconds, "memory": (_peak_bytes() - before) / size}


def _write_idx(path: Path, shape: tuple[int, ...], high: int) -> None:
    draw = np.random.default_rng(0)
    sizes = b"".join(size.to_bytes(4, "big") for size in shape)
    with path.open("wb") as file:
        file.write(bytes([0, 0, 8, len(shape)]) + sizes)
        # In pieces, so that writing does not determine the peak of the memory.
        for _ in range(0, shape[0], 1000):
            file.write(draw.integers(0, high, (1000, *shape[1:]), dtype=np.uint8).tobytes())


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        os.environ["FEDHET_CACHE"] = cache
        torch.set_num_threads(1)
        answer(partition, client, mnist, latents)
