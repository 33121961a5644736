"""What the data path costs, each question in a process of its own with one thread and an empty
cache.

    python scripts/bench/data.py [--reps N] [--json PATH]     all questions, beside their goals
    python scripts/bench/data.py partition SCHEME             {"seconds": to assign 60,000 samples
        to 10,000 clients, after the imports}
    python scripts/bench/data.py client                       {"ms": a client's 500 images of
        32x32x3, gathered and made ready for the model; "torchvision", "huggingface": by the usual
        transforms}
    python scripts/bench/data.py mnist                        {"seconds": to load 60,000 + 10,000
        images and touch each pixel, "memory": peak beyond the imports / size of the images}

The images are random numbers in the published layout. `torchvision`: ToTensor and Normalize image
by image in a DataLoader, as its CIFAR10 does; `huggingface`: the same by with_transform on a
dataset of images, as in Flower's quickstarts."""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from cells import data as cell
from harness import plain, show

MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
IMAGES, BATCH = 500, 50


def partition(name: str) -> dict[str, float]:
    import datasets  # noqa: F401 -- importing takes as long whatever is assigned
    import flwr_datasets.partitioner  # noqa: F401

    from fedhet import config
    from fedhet.config.targets import instantiate

    n, clients = 60_000, 10_000
    draw = np.random.default_rng(0)
    labels, owners = draw.permutation(np.arange(n) % 10), draw.permutation(np.arange(n) % clients)
    scheme = instantiate(
        config.compose(
            [f"partition={name}", f"partition.clients={clients}", "partition.min_size=0"]
        ).cfg.partition
    )
    began = time.perf_counter()
    scheme.assign(labels, 0, owners, tuple(map(str, range(clients))))
    return {"seconds": time.perf_counter() - began}


def client() -> dict[str, float]:
    import torch

    from fedhet.data import Dataset, Federation, Partition, transform
    from fedhet.site import Site
    from fedhet.task import Samples, Task

    torch.set_num_threads(1)
    x, y = torch.randint(0, 256, (10_000, 3, 32, 32), dtype=torch.uint8), torch.arange(10_000) % 10
    dataset = Dataset(
        "random", x, y, Samples(x[:10], y[:10]), tuple(map(str, range(10))), MEAN, STD
    )
    indices = np.array_split(np.random.default_rng(0).permutation(len(x)), len(x) // IMAGES)
    clients = Federation(dataset, Partition("iid", indices), [1, 0, 0], 0)
    site = Site(
        Task(
            lambda: torch.nn.Linear(1, 1),
            lambda output, y: output,
            clients,
            None,
            10,
            transform(dataset),
            clients.sizes,
        ),
        device=torch.device("cpu"),
        seed=0,
    )
    return {
        "ms": _ms(lambda: site.prepared(clients[0].train), 100),
        **_usual(x[:IMAGES].permute(0, 2, 3, 1).numpy(), y[:IMAGES].tolist()),
    }


def _usual(x: np.ndarray, y: list[int]) -> dict[str, float]:
    """The same 500 images once through the usual pipelines; x (n, H, W, C) uint8."""
    import datasets
    from PIL import Image
    from torch.utils.data import DataLoader
    from torchvision.transforms import Compose, Normalize, ToTensor

    apply = Compose([ToTensor(), Normalize(MEAN, STD)])
    by_image = [(Image.fromarray(image), label) for image, label in zip(x, y, strict=True)]
    features = datasets.Features({"img": datasets.Image(), "label": datasets.Value("int64")})
    hugging = datasets.Dataset.from_dict(
        {"img": [image for image, _ in by_image], "label": y}, features=features
    )
    hugging = hugging.with_transform(
        lambda batch: {**batch, "img": [apply(image) for image in batch["img"]]}
    )
    torchvision = DataLoader(
        by_image, BATCH, collate_fn=lambda pairs: [(apply(image), label) for image, label in pairs]
    )
    return {
        "torchvision": _ms(lambda: list(torchvision), 5),
        "huggingface": _ms(lambda: list(DataLoader(hugging, BATCH)), 5),
    }


def _ms(work: Callable[[], object], reps: int) -> float:
    spent = []
    for _ in range(reps + 1):
        began = time.perf_counter()
        work()
        spent.append(time.perf_counter() - began)
    return statistics.median(spent[1:]) * 1000  # the first fills caches


def mnist() -> dict[str, float]:
    import torch
    import torchvision.datasets  # noqa: F401 -- all that is imported is there before memory is measured

    from fedhet import config
    from fedhet.config.targets import instantiate
    from fedhet.data import images  # noqa: F401

    torch.set_num_threads(1)
    cfg = config.compose(["dataset=mnist"]).cfg.dataset
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder, "MNIST", "raw")
        raw.mkdir(parents=True)
        for part, n in (("train", 60_000), ("t10k", 10_000)):
            _write_idx(raw / f"{part}-images-idx3-ubyte", (n, 28, 28), 256)
            _write_idx(raw / f"{part}-labels-idx1-ubyte", (n,), 10)
        before = _peak()
        began = time.perf_counter()
        dataset = instantiate(cfg, data_dir=folder)
        highest = max(int(part.max()) for part in (dataset.x, dataset.test.x))
        seconds = time.perf_counter() - began
        if highest != 255:
            raise SystemExit(f"the highest pixel is {highest}, not 255")
        return {
            "seconds": seconds,
            "memory": (_peak() - before) / (dataset.x.nbytes + dataset.test.x.nbytes),
        }


def _write_idx(path: Path, shape: tuple[int, ...], high: int) -> None:
    draw = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(
            bytes([0, 0, 8, len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape)
        )
        for _ in range(0, shape[0], 1000):  # in pieces: it must not be this that needs the memory
            file.write(draw.integers(0, high, (1000, *shape[1:]), dtype=np.uint8).tobytes())


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("question", nargs="?", choices=("partition", "client", "mnist"))
    parser.add_argument("scheme", nargs="?", default="iid")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.question:
        questions: dict[str, Callable[[], dict[str, Any]]] = {
            "partition": lambda: partition(args.scheme),
            "client": client,
            "mnist": mnist,
        }
        with tempfile.TemporaryDirectory() as cache:
            os.environ["FEDHET_CACHE"] = cache
            print(json.dumps(questions[args.question]()))
        return
    found = cell(args.reps)
    show(found)
    if args.json:
        args.json.write_text(json.dumps(plain(found), indent=1) + "\n")


if __name__ == "__main__":
    main()
