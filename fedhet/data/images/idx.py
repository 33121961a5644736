"""MNIST and its relatives, from idx files."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from fedhet.core import check
from fedhet.core.errors import DataError
from fedhet.core.task import Samples
from fedhet.data.array_cache import identity, signature
from fedhet.data.arrays import labels_from_zero
from fedhet.data.dataset import Dataset, Statistic
from fedhet.data.files import download_hint, find_folder

log = logging.getLogger("fedhet.data")


def mnist(*, name: str, data_dir: str, folder: str, mean: Statistic, std: Statistic) -> Dataset:
    """MNIST from `<data_dir>/<folder>/raw`, the unzipped files that torchvision keeps there."""
    from torchvision.datasets import MNIST

    files = _find_files(data_dir, folder, "mnist")
    return _load(name, files, MNIST.classes, mean, std)


def fashion_mnist(
    *, name: str, data_dir: str, folder: str, mean: Statistic, std: Statistic
) -> Dataset:
    """Fashion-MNIST from `<data_dir>/<folder>/raw`, in the same layout as MNIST."""
    from torchvision.datasets import FashionMNIST

    files = _find_files(data_dir, folder, "fashion_mnist")
    return _load(name, files, FashionMNIST.classes, mean, std)


def emnist(
    *,
    name: str,
    data_dir: str,
    folder: str,
    split: str,
    mean: Statistic,
    std: Statistic,
) -> Dataset:
    """EMNIST from `<data_dir>/<folder>/raw`, the unzipped files that torchvision keeps there.

    The images are turned upright.

    Args:
        split: which of the publisher's six: byclass (62 classes), bymerge (47), balanced (47),
            letters (26), digits or mnist.
    """
    from torchvision.datasets import EMNIST

    check.one_of("dataset.split", split, EMNIST.splits)
    parts = (f"emnist-{split}-train", f"emnist-{split}-test")
    files = _find_files(data_dir, folder, "emnist", parts)
    # The labels of "letters" begin at 1; torchvision gives 0 the name "N/A".
    first = int(split == "letters")
    classes = EMNIST.classes_split_dict[split][first:]
    return _load(name, files, classes, mean, std, first=first, transpose=True)


def _find_files(
    data_dir: str, folder: str, dataset: str, parts: tuple[str, str] = ("train", "t10k")
) -> list[Path]:
    """The files of training images and labels, then those of test images and labels."""
    contents = ("images-idx3", "labels-idx1")
    files = [f"raw/{part}-{content}-ubyte" for part in parts for content in contents]
    place = find_folder(data_dir, [(folder, files)], download_hint(dataset, data_dir))
    return [place / file for file in files]


def _load(
    name: str,
    files: Sequence[Path],
    classes: Sequence[str],
    mean: Statistic,
    std: Statistic,
    *,
    first: int = 0,
    transpose: bool = False,
) -> Dataset:
    """The dataset of the files that `_find_files` returns.

    `first` is the lowest label. `transpose` is for files that store each image column by column.
    """
    log.info("%s: the idx files in %s", name, files[0].parent)
    parts = []
    for images, labels in (files[:2], files[2:]):
        x = torch.from_numpy(_map_idx(images, 3)).unsqueeze(1)
        y = labels_from_zero(labels, _map_idx(labels, 1), len(classes), first)
        if len(x) != len(y):
            raise DataError(
                f"{images} contains {check.counted(len(x), 'image')}, but the file of their labels"
                f" contains {len(y)}; the numbers must be equal"
            )
        parts.append(Samples(x.mT if transpose else x, torch.from_numpy(y)))
    train, test = parts
    source = identity(name, {"idx": signature(files), "transpose": transpose})
    return Dataset(name, train.x, train.y, test, tuple(classes), mean, std, source=source)


def _map_idx(path: Path, ndim: int) -> np.ndarray:
    """The uint8 array of `ndim` dimensions in an idx file, mapped: nothing is read yet.

    The format is described at http://yann.lecun.com/exdb/mnist.

    Raises:
        DataError: the file cannot be read, or does not match its header.
    """
    start = 4 * (1 + ndim)
    try:
        with path.open("rb") as file:
            header = file.read(start)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    shape = tuple(np.frombuffer(header[4:], ">u4").tolist()) if len(header) == start else ()
    size = path.stat().st_size
    if header[:4] != bytes([0, 0, 8, ndim]) or size != start + math.prod(shape):
        raise DataError(
            f"{path} is damaged or truncated: expected an idx file of bytes with {ndim} dimensions"
            f" and of the size that its header states; it has {size} bytes and begins with"
            f" {header!r}"
        )
    if not all(shape):
        raise DataError(f"{path} contains no samples: its shape is {shape}")
    return np.memmap(path, np.uint8, "c", start, shape)
