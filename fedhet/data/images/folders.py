"""Datasets of image files in folders by class."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedhet.core import check
from fedhet.core.errors import ConfigError, DataError
from fedhet.core.task import Samples
from fedhet.data.array_cache import Arrays, cached_arrays, identity, signature
from fedhet.data.dataset import Dataset, Statistic
from fedhet.data.files import download_hint, find_folder
from fedhet.data.images.image_files import (
    PATTERNS,
    Listing,
    concatenate,
    decoder,
    list_images,
    read_images,
)

log = logging.getLogger("fedhet.data")

FOLDERS = ("train/", "test/")  # what a folder of training and test images contains
_COLOURS = {"any": None, "grey": "L", "rgb": "RGB"}  # PIL's modes


def cinic10(
    *,
    name: str,
    data_dir: str,
    folder: str,
    mean: Statistic,
    std: Statistic,
    augment: str = "none",
) -> Dataset:
    """CINIC-10 from `<data_dir>/<folder>/{train,test}/<class>/*.png`.

    Its third part, `valid`, is not used.
    """
    place = find_folder(data_dir, [(folder, FOLDERS)], download_hint("cinic10", data_dir))
    return load_folders(name, place, mean, std, mode="RGB", augment=augment)


def tiny_imagenet(
    *,
    name: str,
    data_dir: str,
    folder: str,
    mean: Statistic,
    std: Statistic,
    augment: str = "none",
) -> Dataset:
    """Tiny ImageNet from `<data_dir>/<folder>`, in its publisher's layout.

    The labels of its test set are not public, so the validation set, `val/images` with
    `val_annotations.txt`, is the global test set.
    """
    contents = ("train/", "val/images/", "val/val_annotations.txt")
    place = find_folder(data_dir, [(folder, contents)], download_hint("tiny_imagenet", data_dir))
    train = list_images(place / "train", inner="images")
    test = _list_annotated(place / "val", train.classes)
    return _load(name, train, test, mean, std, mode="RGB", augment=augment)


def _list_annotated(folder: Path, classes: tuple[str, ...]) -> Listing:
    """The images that `val_annotations.txt` lists: each line is a file, a tab, and its class."""
    annotations = folder / "val_annotations.txt"
    images = folder / "images"
    try:
        lines = annotations.read_text(encoding="utf-8").splitlines()
    except ValueError as error:
        raise DataError(f"{annotations} is damaged: {error}") from error
    if not lines:
        raise DataError(f"{annotations} is empty; expected a line for each image in {images}")
    paths = []
    labels = []
    for row, line in enumerate(lines):
        file, _, rest = line.partition("\t")
        label = rest.partition("\t")[0]
        if label not in classes:
            raise DataError(
                f"{annotations}, row {row} is {line!r}; expected a file, a tab, and one of the"
                f" {len(classes)} folders of the training images"
            )
        path = images / file
        if not path.is_file():
            raise DataError(f"{annotations}, row {row} names {path}, which does not exist")
        paths.append(path)
        labels.append(classes.index(label))
    return Listing(paths, labels, classes)


def chest_xray(
    *,
    name: str,
    data_dir: str,
    folder: str,
    sources: Sequence[str] | None,
    size: int,
    mean: Statistic,
    std: Statistic,
) -> Dataset:
    """Chest X-rays from several sources, converted to grey.

    They are `<data_dir>/<folder>/<source>/{train,test}/<class>/*.png` or `.jpg`. The source is each
    image's owner. Without source folders, `<data_dir>/<folder>/{train,test}` is the only source.

    Args:
        sources: the source folders to use, in this order; None: all that contain images.
        size: every image is resized to (size, size).
    """
    check.integer("dataset.size", size, low=1)
    names = check.optional(partial(check.each, check.text), "dataset.sources", sources)
    if names is not None and (not names or len(set(names)) < len(names)):
        raise ConfigError(
            f"dataset.sources={list(names)}: must be null, or a list of distinct folders"
        )
    places = _find_sources(data_dir, folder, names)
    log.info("%s: the image folders %s", name, ", ".join(map(str, places)))
    train = [list_images(places[0] / "train")]
    classes = train[0].classes
    train += [list_images(place / "train", classes) for place in places[1:]]
    test = [list_images(place / "test", classes) for place in places]
    names_of_places = tuple(place.name for place in places)
    return _load(
        name,
        concatenate(train),
        concatenate(test),
        mean,
        std,
        size=size,
        mode="L",
        owners=np.repeat(np.arange(len(places)), [len(listing.paths) for listing in train]),
        owner_names=names_of_places,
        test_owners=np.repeat(names_of_places, [len(listing.paths) for listing in test]),
    )


def _find_sources(data_dir: str, folder: str, sources: Sequence[str] | None) -> list[Path]:
    """The folder of each source, all sources where `sources` is None."""
    wanted = [f"{source}/{part}" for source in sources or ["*"] for part in FOLDERS]
    layouts: list[tuple[str, Sequence[str]]] = [(folder, wanted)]
    if sources is None:
        layouts.append((folder, FOLDERS))
    place = find_folder(data_dir, layouts, download_hint("chest_xray", data_dir))
    if sources is not None:
        return [place / source for source in sources]
    if (place / "train").is_dir():
        return [place]
    return sorted(train.parent for train in place.glob("*/train/"))


def image_folder(
    *,
    name: str,
    data_dir: str,
    folder: str,
    mean: Statistic,
    std: Statistic,
    size: int | None = None,
    colours: str = "any",
) -> Dataset:
    """The user's own images, `<data_dir>/<folder>/{train,test}/<class>/*.png` or `.jpg`.

    Classes are in alphabetical order.

    Args:
        size: resizes each image to (size, size); None: all must have the same size.
        colours: "grey" or "rgb" converts all images; "any": all must be grey or all in colour.
    """
    check.optional(check.integer, "dataset.size", size, low=1)
    mode = _COLOURS[check.one_of("dataset.colours", colours, _COLOURS)]
    hint = (
        f"Put your images there as {{train,test}}/<class>/{PATTERNS}, name the folder in"
        " dataset.folder"
    )
    place = find_folder(data_dir, [(folder, FOLDERS)], hint)
    return load_folders(name, place, mean, std, size=size, mode=mode)


# ---- from listed images to a dataset


def load_folders(
    name: str, place: Path, mean: Statistic, std: Statistic, **options: Any
) -> Dataset:
    """The dataset of `<place>/{train,test}/<class>/`; for the options see `_load`."""
    train = list_images(place / "train")
    test = list_images(place / "test", train.classes)
    return _load(name, train, test, mean, std, **options)


def _load(
    name: str,
    train: Listing,
    test: Listing,
    mean: Statistic,
    std: Statistic,
    *,
    size: int | None = None,
    mode: str | None = None,
    **fields: Any,
) -> Dataset:
    """The dataset of the listed images, which are decoded once.

    `size` and `mode` are those of `read_images`; `fields` are further fields of the dataset.
    """
    paths = train.paths + test.paths

    def decode() -> Arrays:
        return {"x": read_images([(str(path), path) for path in paths], size, mode)}

    key = {"images": signature(paths), "size": size, "mode": mode, **decoder()}
    x = torch.from_numpy(cached_arrays(name, key, decode)["x"])
    n_train = len(train.paths)
    return Dataset(
        name,
        x[:n_train],
        torch.tensor(train.labels),
        Samples(x[n_train:], torch.tensor(test.labels)),
        train.classes,
        mean,
        std,
        source=identity(name, key),
        **fields,
    )
