"""Image datasets.

Each loader is a Hydra target (conf/dataset/*.yaml) and imports what it needs only when it is
called. Nothing is downloaded. Idx files are mapped as they are; every other format is decoded once
into arrays that are mapped (fedhet.data.store). `mean` and `std` are of the pixels in [0, 1]: one
number, or one per channel."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedhet import check
from fedhet.data.array_cache import Arrays, signature, stored
from fedhet.data.dataset import Dataset
from fedhet.data.decode import map_idx, read_batches, read_images, read_labels, read_parquet
from fedhet.data.files import IMAGES, Listing, downloading, find, list_images
from fedhet.errors import ConfigError, DataError
from fedhet.task import Samples

log = logging.getLogger("fedhet.data")

_FOLDERS = ("train/", "test/")
_COLOURS = {"any": None, "grey": "L", "rgb": "RGB"}  # PIL's modes
_TABLES = ("train*.parquet", "test*.parquet")


def digits(
    *, name: str, mean: Sequence[float], std: Sequence[float], data_dir: str = ""
) -> Dataset:
    """scikit-learn's 1,797 digits, 8x8 in 17 grey levels, which come with the library (`data_dir`
    is not used).

    The global test set is a fixed stratified 20 %, whatever the seed of the run. They are kept
    decoded: to import scikit-learn takes longer than a short run, and in a real deployment each
    message is a new process."""
    arrays = stored(name, {"loader": "digits", "version": version("scikit-learn")}, _digits)
    found = {key: torch.from_numpy(array) for key, array in arrays.items()}
    return Dataset(
        name,
        found["x"],
        found["y"],
        Samples(found["test_x"], found["test_y"]),
        tuple("0123456789"),
        mean,
        std,
    )


def _digits() -> Arrays:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    cut = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=0)
    # sixteenths are exact
    x, test_x = ((part / 16).astype(np.float32).reshape(-1, 1, 8, 8) for part in cut[:2])
    return {
        "x": x,
        "y": cut[2].astype(np.int64),
        "test_x": test_x,
        "test_y": cut[3].astype(np.int64),
    }


# ---- idx files


def mnist(
    *, name: str, data_dir: str, folder: str, mean: Sequence[float], std: Sequence[float]
) -> Dataset:
    """MNIST from `<data_dir>/<folder>/raw`, the unzipped files that torchvision keeps there."""
    from torchvision.datasets import MNIST

    return _idx(name, _raw(data_dir, folder, "mnist"), MNIST.classes, mean, std)


def fashion_mnist(
    *, name: str, data_dir: str, folder: str, mean: Sequence[float], std: Sequence[float]
) -> Dataset:
    """Fashion-MNIST from `<data_dir>/<folder>/raw`, the unzipped files that torchvision keeps
    there."""
    from torchvision.datasets import FashionMNIST

    return _idx(name, _raw(data_dir, folder, "fashion_mnist"), FashionMNIST.classes, mean, std)


def emnist(
    *,
    name: str,
    data_dir: str,
    folder: str,
    split: str,
    mean: Sequence[float],
    std: Sequence[float],
) -> Dataset:
    """EMNIST from `<data_dir>/<folder>/raw`, the unzipped files that torchvision keeps there; the
    images are turned upright.

    Args: split: which of the publisher's six, byclass (62 classes), bymerge (47), balanced (47),
        letters (26), digits, mnist.
    """
    from torchvision.datasets import EMNIST

    check.one_of("dataset.split", split, EMNIST.splits)
    files = _raw(data_dir, folder, "emnist", (f"emnist-{split}-train", f"emnist-{split}-test"))
    letters = split == "letters"  # counts from 1; torchvision gives 0 the name "N/A"
    return _idx(
        name,
        files,
        EMNIST.classes_split_dict[split][letters:],
        mean,
        std,
        first=int(letters),
        upright=True,
    )


def _raw(
    data_dir: str, folder: str, dataset: str, parts: tuple[str, str] = ("train", "t10k")
) -> list[Path]:
    files = [
        f"raw/{part}-{what}-ubyte" for part in parts for what in ("images-idx3", "labels-idx1")
    ]
    place = find(data_dir, [(folder, files)], downloading(dataset, data_dir))
    return [place / file for file in files]


def _idx(
    name: str,
    files: Sequence[Path],
    classes: Sequence[str],
    mean: Sequence[float],
    std: Sequence[float],
    *,
    first: int = 0,
    upright: bool = False,
) -> Dataset:
    """`files`: training images and labels, test images and labels. `upright`: the files hold each
    image column by column."""
    log.info("%s: the idx files in %s", name, files[0].parent)
    parts = []
    for images, labels in (files[:2], files[2:]):
        x, y = (
            torch.from_numpy(map_idx(images, 3)).unsqueeze(1),
            read_labels(labels, map_idx(labels, 1), len(classes), first),
        )
        if len(x) != len(y):
            raise DataError(
                f"{images} holds {len(x)} images, but the file of their labels {len(y)}; they must"
                " be as many"
            )
        parts.append(Samples(x.mT if upright else x, torch.from_numpy(y)))
    train, test = parts
    return Dataset(name, train.x, train.y, test, tuple(classes), mean, std)


# ---- CIFAR


def cifar10(
    *,
    name: str,
    data_dir: str,
    folder: str | None,
    mean: Sequence[float],
    std: Sequence[float],
    augment: str = "none",
) -> Dataset:
    """CIFAR-10 from torchvision's batches, or else from an image folder
    `{train,test}/<class>/*.png`.

    Args: folder: the folder under `data_dir`, in either layout; None: `cifar-10-batches-py`
        (batches) or `cifar10` (images).
    """
    from torchvision.datasets import CIFAR10

    layouts = [(folder or CIFAR10.base_folder, _batches(CIFAR10)), (folder or "cifar10", _FOLDERS)]
    place = find(data_dir, layouts, downloading("cifar10", data_dir))
    return _cifar(name, place, CIFAR10, mean, std, augment)


def cifar100(
    *,
    name: str,
    data_dir: str,
    folder: str | None,
    mean: Sequence[float],
    std: Sequence[float],
    augment: str = "none",
) -> Dataset:
    """CIFAR-100 with its 100 fine labels, from torchvision's batches, or else from Parquet as on
    Hugging Face, or an image folder.

    Args: folder: the folder under `data_dir`, in any layout; None: `cifar-100-python` (batches) or
        `cifar100` (the others: `train*.parquet` and `test*.parquet` with the columns `img`,
        `fine_label`; `{train,test}/<class>/*.png`).
    """
    from torchvision.datasets import CIFAR100

    other = folder or "cifar100"
    layouts = [
        (folder or CIFAR100.base_folder, _batches(CIFAR100)),
        (other, _TABLES),
        (other, _FOLDERS),
    ]
    place = find(data_dir, layouts, downloading("cifar100", data_dir))
    return _cifar(name, place, CIFAR100, mean, std, augment)


def _batches(kind: Any) -> list[str]:
    """What torchvision's class `kind` keeps in its folder."""
    return [file for file, _ in kind.train_list + kind.test_list] + [kind.meta["filename"]]


def _cifar(
    name: str, place: Path, kind: Any, mean: Sequence[float], std: Sequence[float], augment: str
) -> Dataset:
    if (place / kind.meta["filename"]).exists():
        log.info("%s: torchvision's batches in %s", name, place)
        files = [place / file for file in _batches(kind)]
        found = stored(name, {"batches": signature(files)}, lambda: read_batches(place, kind))
    elif any(place.glob(_TABLES[0])):
        log.info("%s: the Parquet files in %s", name, place)
        tables = [sorted(place.glob(pattern)) for pattern in _TABLES]
        found = stored(
            name,
            {"tables": signature([*tables[0], *tables[1]]), **_decoder()},
            lambda: _tables(tables),
        )
    else:
        log.info("%s: the image folder %s", name, place)
        train = list_images(place / "train")
        return _images(
            name,
            train,
            list_images(place / "test", train.classes),
            mean,
            std,
            mode="RGB",
            augment=augment,
        )
    x, y, test_x, test_y = (torch.from_numpy(found[key]) for key in ("x", "y", "test_x", "test_y"))
    return Dataset(
        name,
        x,
        y,
        Samples(test_x, test_y),
        tuple(found["classes"].tolist()),
        mean,
        std,
        augment=augment,
    )


def _tables(parts: Sequence[Sequence[Path]]) -> Arrays:
    """Training and test set of CIFAR-100, each of one table or more."""
    train, test = (
        [read_parquet(path, "img", "fine_label", 100) for path in paths] for paths in parts
    )
    for path, table in zip([*parts[0], *parts[1]], [*train, *test], strict=True):
        if table["x"].shape[1:] != train[0]["x"].shape[1:]:
            raise DataError(
                f"{path} holds images (C, H, W) = {table['x'].shape[1:]}, but {parts[0][0]}"
                f" {train[0]['x'].shape[1:]}"
            )
    x, y, test_x, test_y = (
        np.concatenate([table[key] for table in part])
        for part in (train, test)
        for key in ("x", "y")
    )
    return {"x": x, "y": y, "test_x": test_x, "test_y": test_y, "classes": train[0]["classes"]}


# ---- image folders


def cinic10(
    *,
    name: str,
    data_dir: str,
    folder: str,
    mean: Sequence[float],
    std: Sequence[float],
    augment: str = "none",
) -> Dataset:
    """CINIC-10 from `<data_dir>/<folder>/{train,test}/<class>/*.png`; its third part, `valid`, is
    not used."""
    place = find(data_dir, [(folder, _FOLDERS)], downloading("cinic10", data_dir))
    train = list_images(place / "train")
    return _images(
        name,
        train,
        list_images(place / "test", train.classes),
        mean,
        std,
        mode="RGB",
        augment=augment,
    )


def tiny_imagenet(
    *,
    name: str,
    data_dir: str,
    folder: str,
    mean: Sequence[float],
    std: Sequence[float],
    augment: str = "none",
) -> Dataset:
    """Tiny ImageNet from `<data_dir>/<folder>`, as its publisher packs it. The labels of its test
    set are not public: the validation set, `val/images` with `val_annotations.txt`, is the global
    test set."""
    place = find(
        data_dir,
        [(folder, ("train/", "val/images/", "val/val_annotations.txt"))],
        downloading("tiny_imagenet", data_dir),
    )
    train = list_images(place / "train", inner="images")
    annotations, paths, labels = place / "val" / "val_annotations.txt", [], []
    try:
        lines = annotations.read_text(encoding="utf-8").splitlines()
    except ValueError as error:
        raise DataError(f"{annotations} is damaged: {error}") from error
    if not lines:
        raise DataError(
            f"{annotations} is empty; expected a line for each image of {place / 'val' / 'images'}"
        )
    for row, line in enumerate(lines):
        file, _, rest = line.partition("\t")
        label = rest.partition("\t")[0]
        if label not in train.classes:
            raise DataError(
                f"{annotations}, row {row} is {line!r}; expected a file, a tab, and one of the"
                f" {len(train.classes)} folders of {place / 'train'}"
            )
        if not (path := place / "val" / "images" / file).is_file():
            raise DataError(f"{annotations}, row {row} names {path}, which is not there")
        paths.append(path)
        labels.append(train.classes.index(label))
    return _images(
        name, train, Listing(paths, labels, train.classes), mean, std, mode="RGB", augment=augment
    )


def chest_xray(
    *,
    name: str,
    data_dir: str,
    folder: str,
    sources: Sequence[str] | None,
    size: int,
    mean: Sequence[float],
    std: Sequence[float],
) -> Dataset:
    """Chest X-rays of several sources, `<data_dir>/<folder>/<source>/{train,test}/<class>/*.png` or
    `.jpg`, made grey.

    The source is each image's owner. Without folders of sources, `<data_dir>/<folder>/{train,test}`
    is the only one.

    Args:
        sources: which folders to take, in this order; None: all that hold images.
        size: every image is resized to (size, size).
    """
    check.integer("dataset.size", size, low=1)
    given = check.optional(partial(check.each, check.text), "dataset.sources", sources)
    if given is not None and (not given or len(set(given)) < len(given)):
        raise ConfigError(
            f"dataset.sources={list(given)}: must be null, or a list of different folders"
        )
    wanted = [f"{source}/{part}" for source in sources or ["*"] for part in _FOLDERS]
    place = find(
        data_dir,
        [(folder, wanted)] + ([(folder, _FOLDERS)] if sources is None else []),
        downloading("chest_xray", data_dir),
    )
    if sources is not None:
        places = [place / source for source in sources]
    elif (place / "train").is_dir():
        places = [place]
    else:
        places = sorted(train.parent for train in place.glob("*/train/"))
    log.info("%s: the image folders %s", name, ", ".join(map(str, places)))
    train = [list_images(each / "train") for each in places[:1]]
    train += [list_images(each / "train", train[0].classes) for each in places[1:]]
    test = [list_images(each / "test", train[0].classes) for each in places]
    owners = np.repeat(np.arange(len(places)), [len(part.paths) for part in train])
    return _images(
        name,
        _joined(train),
        _joined(test),
        mean,
        std,
        size=size,
        mode="L",
        owners=owners,
        owner_names=tuple(each.name for each in places),
    )


def _joined(parts: Sequence[Listing]) -> Listing:
    return Listing(
        [p for part in parts for p in part.paths],
        [y for part in parts for y in part.labels],
        parts[0].classes,
    )


def image_folder(
    *,
    name: str,
    data_dir: str,
    folder: str,
    mean: Sequence[float],
    std: Sequence[float],
    size: int | None = None,
    colours: str = "any",
) -> Dataset:
    """The user's own images, `<data_dir>/<folder>/{train,test}/<class>/*.png` or `.jpg`; classes in
    alphabetical order.

    Args:
        size: resizes each image to (size, size); None: they must be alike.
        colours: "grey" or "rgb" makes all so; "any": they must be alike.
    """
    check.optional(check.integer, "dataset.size", size, low=1)
    mode = _COLOURS[check.one_of("dataset.colours", colours, _COLOURS)]
    hint = (
        f"Put your images there as {{train,test}}/<class>/*{' or *'.join(IMAGES)}, name the folder"
        " in dataset.folder"
    )
    place = find(data_dir, [(folder, _FOLDERS)], hint)
    train = list_images(place / "train")
    return _images(
        name, train, list_images(place / "test", train.classes), mean, std, size=size, mode=mode
    )


def _images(
    name: str,
    train: Listing,
    test: Listing,
    mean: Sequence[float],
    std: Sequence[float],
    *,
    size: int | None = None,
    mode: str | None = None,
    **more: Any,
) -> Dataset:
    """`more`: further fields of the dataset."""
    paths = train.paths + test.paths
    key = {"images": signature(paths), "size": size, "mode": mode, **_decoder()}
    x = torch.from_numpy(
        stored(
            name, key, lambda: {"x": read_images([(str(path), path) for path in paths], size, mode)}
        )["x"]
    )
    cut = len(train.paths)
    return Dataset(
        name,
        x[:cut],
        torch.tensor(train.labels),
        Samples(x[cut:], torch.tensor(test.labels)),
        train.classes,
        mean,
        std,
        **more,
    )


def _decoder() -> dict[str, str]:
    """Part of the keys of decoded images: other versions may decode a JPEG otherwise."""
    return {"pillow": version("pillow")}
