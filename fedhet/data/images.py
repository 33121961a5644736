"""Image datasets.

Each loader is a Hydra target (conf/dataset/*.yaml) and imports what it needs only when it is called. Nothing is downloaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedhet.data.dataset import Dataset
from fedhet.data.files import find, list_images, read_images
from fedhet.errors import ConfigError, DataError
from fedhet.task import Samples

log = logging.getLogger("fedhet")

_FOLDERS = ("train", "test")


def digits(*, name: str, mean: Sequence[float], std: Sequence[float], data_dir: str = "") -> Dataset:
    """scikit-learn's 1,797 digits, 8x8 in 17 grey levels, which come with the library (`data_dir` is not used).

    The global test set is a fixed stratified 20 %, whatever the seed of the run.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    train_x, test_x, train_y, test_y = train_test_split(bunch.images, bunch.target, test_size=0.2, stratify=bunch.target, random_state=0)
    x, test = (torch.from_numpy(part).to(torch.float32).div_(16).unsqueeze(1) for part in (train_x, test_x))
    y, test_labels = (torch.from_numpy(part).to(torch.int64) for part in (train_y, test_y))
    return Dataset(name, x, y, Samples(test, test_labels), tuple(str(label) for label in bunch.target_names), tuple(mean), tuple(std))


def mnist(*, name: str, data_dir: str, folder: str, mean: Sequence[float], std: Sequence[float]) -> Dataset:
    """MNIST from `<data_dir>/<folder>/raw`, the unzipped files that torchvision keeps there."""
    from torchvision.datasets import MNIST

    return _idx(name, data_dir, folder, mean, std, MNIST)


def fashion_mnist(*, name: str, data_dir: str, folder: str, mean: Sequence[float], std: Sequence[float]) -> Dataset:
    """Fashion-MNIST from `<data_dir>/<folder>/raw`, the unzipped files that torchvision keeps there."""
    from torchvision.datasets import FashionMNIST

    return _idx(name, data_dir, folder, mean, std, FashionMNIST)


def _idx(name: str, data_dir: str, folder: str, mean: Sequence[float], std: Sequence[float], kind: type) -> Dataset:
    from torchvision.datasets.mnist import read_image_file, read_label_file

    files = [f"raw/{part}-{what}-ubyte" for part in ("train", "t10k") for what in ("images-idx3", "labels-idx1")]
    place = find(data_dir, [(folder, files)], _download(kind.__name__))
    train_x, train_y, test_x, test_y = (
        _read_idx(read, place / file) for file, read in zip(files, (read_image_file, read_label_file) * 2, strict=True)
    )
    for images, labels, file in ((train_x, train_y, files[0]), (test_x, test_y, files[2])):
        if len(images) != len(labels):
            raise DataError(f"{place / file} holds {len(images)} images, but the file of their labels {len(labels)}; they must be as many")
    classes = tuple(kind.classes)  # type: ignore[attr-defined]
    return Dataset(name, train_x.unsqueeze(1), train_y, Samples(test_x.unsqueeze(1), test_y), classes, tuple(mean), tuple(std))


def _read_idx(read: Callable[[str], Tensor], path: Path) -> Tensor:
    try:
        return read(str(path))
    except (AssertionError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:  # what torchvision's parser raises
        raise DataError(f"{path} is damaged or cut short: expected an idx file as its header announces ({error})") from error


def cifar10(*, name: str, data_dir: str, folder: str | None, mean: Sequence[float], std: Sequence[float]) -> Dataset:
    """CIFAR-10 from torchvision's batches, or else from an image folder `{train,test}/<class>/*.png`.

    Args:
        folder: the folder under `data_dir`, in either layout; None: `cifar-10-batches-py` (batches) or `cifar10` (images).
    """
    from torchvision.datasets import CIFAR10

    batches = [file for file, _ in CIFAR10.train_list + CIFAR10.test_list] + [CIFAR10.meta["filename"]]
    layouts = [(folder or CIFAR10.base_folder, batches), (folder or "cifar10", _FOLDERS)]
    place = find(data_dir, layouts, _download("CIFAR10"))
    if (place / batches[0]).exists():
        log.info("%s: torchvision's batches in %s", name, place)
        return _batches(name, place, mean, std)
    log.info("%s: the image folder %s", name, place)
    return _images(name, place, None, mean, std)


def _batches(name: str, place: Path, mean: Sequence[float], std: Sequence[float]) -> Dataset:
    from torchvision.datasets import CIFAR10
    from torchvision.datasets.utils import check_integrity

    class Batches(CIFAR10):
        base_folder = place.name

    sums = [*Batches.train_list, *Batches.test_list, (Batches.meta["filename"], Batches.meta["md5"])]
    for file, md5 in sums:  # the batches are pickles: only the published bytes are opened
        if not check_integrity(str(place / file), md5):
            raise DataError(f"{place / file} is damaged: its md5 must be {md5}")
    train, test = (Batches(place.parent, train=part) for part in (True, False))
    x, test_x = (torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous() for part in (train, test))
    y, test_y = (torch.tensor(part.targets) for part in (train, test))
    return Dataset(name, x, y, Samples(test_x, test_y), tuple(train.classes), tuple(mean), tuple(std))


def image_folder(*, name: str, data_dir: str, folder: str, mean: Sequence[float], std: Sequence[float], size: int | None = None) -> Dataset:
    """The user's own images, `<data_dir>/<folder>/{train,test}/<class>/*.png` or `.jpg`; classes in alphabetical order.

    Grey images have one channel, coloured ones three. `size` resizes each to (size, size); without it they must be alike.
    """
    if size is not None and (type(size) is not int or size < 1):
        raise ConfigError(f"dataset.size={size!r}: must be null or a number of pixels >= 1")
    hint = "Put your images there as {train,test}/<class>/*.png or .jpg, name the folder in dataset.folder"
    return _images(name, find(data_dir, [(folder, _FOLDERS)], hint), size, mean, std)


def _images(name: str, place: Path, size: int | None, mean: Sequence[float], std: Sequence[float]) -> Dataset:
    train, labels, classes = list_images(place / "train")
    test, test_labels, _ = list_images(place / "test", classes)
    x = torch.from_numpy(read_images(train + test, size))
    y = torch.tensor(labels + test_labels)
    cut = len(train)
    return Dataset(name, x[:cut], y[:cut], Samples(x[cut:], y[cut:]), classes, tuple(mean), tuple(std))


def _download(kind: str) -> str:
    return f"""Get it with: python -c "from torchvision.datasets import {kind}; {kind}('data', download=True)\""""
