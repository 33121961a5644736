"""Cut the subsets of the published measurements from the whole data sets.

    python -m fedhet data download mnist
    python scripts/subsets mnist                    # from data/ into subsets/
    FEDHET_DATA_DIR=subsets python -m fedhet reproduce fedlex/table1

The subsets of MNIST and Fashion-MNIST have 700 training and 200 test images of each class. The
images are evenly spaced among the n images of the class, at i * n // 700 and i * n // 200. The
subset of CIFAR-10 has 250 training and 50 test images of each class; cifar10.csv lists their
positions among the images of their class.

If a subset is not byte for byte the subset of the measurements, the command refuses it and writes
nothing of it.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import struct
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from PIL import Image
from torchvision.datasets import CIFAR10, MNIST, FashionMNIST

HERE = Path(__file__).parent
PER_CLASS = {"train": 700, "t10k": 200}
# The sum of CIFAR-10 is over the pixels, in the order of cifar10.csv: PNG files differ with the
# program that writes them.
SUMS = dict(line.split()[::-1] for line in (HERE / "SHA256SUMS").read_text().splitlines())

Array = NDArray[np.uint8]


def mnist(dataset: type[MNIST], source: Path) -> dict[str, bytes]:
    """Return the subset's files: path -> content.

    Raises:
        RuntimeError: the whole data set is not in `source`.
        SystemExit: a file differs from the file of the measurements.
    """
    files: dict[str, bytes] = {}
    for split, count in PER_CLASS.items():
        whole = dataset(str(source), train=split == "train")
        labels = whole.targets.numpy().astype(np.uint8)
        chosen = evenly_spaced(labels, count)
        for kind, array in (("images-idx3", whole.data.numpy()), ("labels-idx1", labels)):
            path = f"{dataset.__name__}/raw/{split}-{kind}-ubyte"
            files[path] = idx(array[chosen])
            _check(path, files[path])
    return files


def evenly_spaced(labels: Array, count: int) -> NDArray[np.intp]:
    """Return the positions of `count` samples of each class, evenly spaced, in their order."""
    places = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    return np.sort(
        np.concatenate([place[np.arange(count) * len(place) // count] for place in places])
    )


def idx(array: Array) -> bytes:
    """Return an array of bytes as a file in the format IDX."""
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 0x08, array.ndim, *array.shape)
    return head + np.ascontiguousarray(array).tobytes()


def cifar10(source: Path) -> dict[str, bytes]:
    """Return the subset's images as PNG files: path -> content.

    Raises:
        RuntimeError: the whole data set is not in `source`.
        SystemExit: the images differ from the images of the measurements.
    """
    whole = {split: CIFAR10(str(source), train=split == "train") for split in ("train", "test")}
    images: dict[str, Array] = {}
    for row in pd.read_csv(HERE / "cifar10.csv").to_dict("records"):
        split, label = row["split"], row["class"]
        dataset = whole[split]
        own = np.flatnonzero(np.array(dataset.targets) == dataset.class_to_idx[label])
        for number in map(int, row["numbers"].split()):
            images[f"cifar10/{split}/{label}/{number:04}.png"] = dataset.data[own[number]]
    _check("cifar10", b"".join(image.tobytes() for image in images.values()))
    files = {path: io.BytesIO() for path in images}
    for path, file in files.items():
        Image.fromarray(images[path]).save(file, format="PNG")
    return {path: file.getvalue() for path, file in files.items()}


def _check(name: str, content: bytes) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != SUMS[name]:
        sys.exit(
            f"error: {name} would have the SHA-256 {found}, but in the measurements it has"
            f" {SUMS[name]}: the source is not the published data set"
        )


CUT: dict[str, Callable[[Path], dict[str, bytes]]] = {
    "mnist": partial(mnist, MNIST),
    "fashion_mnist": partial(mnist, FashionMNIST),
    "cifar10": cifar10,
}


def main() -> None:
    """Cut the subsets that the command names."""
    parser = argparse.ArgumentParser(
        prog="python scripts/subsets",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="+", choices=CUT)
    parser.add_argument(
        "--source", type=Path, default=Path("data"), help="the folder to read; default: data"
    )
    parser.add_argument(
        "--target", type=Path, default=Path("subsets"), help="the folder to write; default: subsets"
    )
    options = parser.parse_args()
    for name in options.names:
        try:
            files = CUT[name](options.source)
        except RuntimeError:  # torchvision's message would advise a download by torchvision
            sys.exit(
                f"error: {options.source} does not have all of {name}; download it by"
                f" `python -m fedhet data download {name} --data-dir {options.source}`"
            )
        for path, content in files.items():
            target = options.target / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        print(f"{name}: {len(files)} files in {options.target}")


if __name__ == "__main__":
    main()
