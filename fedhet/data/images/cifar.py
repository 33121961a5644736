"""CIFAR-10 and CIFAR-100, each in several layouts."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from fedhet.core.errors import DataError
from fedhet.data.array_cache import Arrays, signature
from fedhet.data.arrays import assemble, labels_from_zero
from fedhet.data.dataset import Dataset, Statistic
from fedhet.data.files import download_hint, find_folder
from fedhet.data.images.folders import FOLDERS, load_folders
from fedhet.data.images.image_files import decoder, read_images

log = logging.getLogger("fedhet.data")

_PARQUET = ("train*.parquet", "test*.parquet")


def cifar10(
    *,
    name: str,
    data_dir: str,
    folder: str | None,
    mean: Statistic,
    std: Statistic,
    augment: str = "none",
) -> Dataset:
    """CIFAR-10 from torchvision's batches, or else from `{train,test}/<class>/*.png`.

    Args:
        folder: the folder under `data_dir`, in either layout; None: `cifar-10-batches-py`
            (batches) or `cifar10` (images).
    """
    from torchvision.datasets import CIFAR10

    layouts = [
        (folder or CIFAR10.base_folder, _batch_files(CIFAR10)),
        (folder or "cifar10", FOLDERS),
    ]
    place = find_folder(data_dir, layouts, download_hint("cifar10", data_dir))
    return _load(name, place, CIFAR10, mean, std, augment)


def cifar100(
    *,
    name: str,
    data_dir: str,
    folder: str | None,
    mean: Statistic,
    std: Statistic,
    augment: str = "none",
) -> Dataset:
    """CIFAR-100 with its 100 fine labels.

    It is read from torchvision's batches, or else from Parquet files as on Hugging Face
    (`train*.parquet` and `test*.parquet` with the columns `img` and `fine_label`), or else from
    `{train,test}/<class>/*.png`.

    Args:
        folder: the folder under `data_dir`, in any of these layouts; None: `cifar-100-python`
            (batches) or `cifar100` (the others).
    """
    from torchvision.datasets import CIFAR100

    layouts = [
        (folder or CIFAR100.base_folder, _batch_files(CIFAR100)),
        (folder or "cifar100", _PARQUET),
        (folder or "cifar100", FOLDERS),
    ]
    place = find_folder(data_dir, layouts, download_hint("cifar100", data_dir))
    return _load(name, place, CIFAR100, mean, std, augment)


def _load(
    name: str,
    place: Path,
    torchvision_class: Any,
    mean: Statistic,
    std: Statistic,
    augment: str,
) -> Dataset:
    if (place / torchvision_class.meta["filename"]).exists():
        log.info("%s: torchvision's batches in %s", name, place)
        files = [place / file for file in _batch_files(torchvision_class)]
        key = {"batches": signature(files)}
        read = partial(_read_batches, place, torchvision_class)
    elif any(place.glob(_PARQUET[0])):
        log.info("%s: the Parquet files in %s", name, place)
        train, test = (sorted(place.glob(pattern)) for pattern in _PARQUET)
        key = {"tables": signature([*train, *test]), **decoder()}
        read = partial(_read_tables, train, test)
    else:
        log.info("%s: the image folder %s", name, place)
        return load_folders(name, place, mean, std, mode="RGB", augment=augment)
    return assemble(name, key, read, mean, std, augment)


# ---- torchvision's batches


def _batch_files(torchvision_class: Any) -> list[str]:
    """The names of the files that torchvision keeps in the dataset's folder."""
    parts = torchvision_class.train_list + torchvision_class.test_list
    return [file for file, _ in parts] + [torchvision_class.meta["filename"]]


def _read_batches(place: Path, torchvision_class: Any) -> Arrays:
    """CIFAR's batches in `place`.

    They are pickles, so only files with the published checksums are opened.
    """
    from torchvision.datasets.utils import check_integrity

    class Batches(torchvision_class):  # type: ignore[misc]
        base_folder = place.name

    meta = (Batches.meta["filename"], Batches.meta["md5"])
    for file, md5 in [*Batches.train_list, *Batches.test_list, meta]:
        if not check_integrity(str(place / file), md5):
            raise DataError(f"{place / file} is damaged: its md5 must be {md5}")
    train = Batches(place.parent, train=True)
    test = Batches(place.parent, train=False)
    return {
        "x": np.ascontiguousarray(train.data.transpose(0, 3, 1, 2)),
        "y": np.array(train.targets),
        "test_x": np.ascontiguousarray(test.data.transpose(0, 3, 1, 2)),
        "test_y": np.array(test.targets),
        "classes": np.array(train.classes),
    }


# ---- Parquet files


def _read_tables(train_paths: Sequence[Path], test_paths: Sequence[Path]) -> Arrays:
    """CIFAR-100's training and test set, each of one table or more."""
    train = [_read_table(path, "img", "fine_label", 100) for path in train_paths]
    test = [_read_table(path, "img", "fine_label", 100) for path in test_paths]
    shape = train[0]["x"].shape[1:]
    for path, table in zip([*train_paths, *test_paths], [*train, *test], strict=True):
        if table["x"].shape[1:] != shape:
            raise DataError(
                f"{path} contains images of (C, H, W) = {table['x'].shape[1:]}, but"
                f" {train_paths[0]} of {shape}"
            )
    return {
        "x": np.concatenate([table["x"] for table in train]),
        "y": np.concatenate([table["y"] for table in train]),
        "test_x": np.concatenate([table["x"] for table in test]),
        "test_y": np.concatenate([table["y"] for table in test]),
        "classes": train[0]["classes"],
    }


def _read_table(path: Path, image: str, label: str, classes: int) -> Arrays:
    """x, y and the classes' names from a table as Hugging Face writes it.

    It has a column of encoded images and a column of labels.
    """
    import pyarrow
    from pyarrow import compute, parquet

    try:
        table = parquet.read_table(path)
        if missing := sorted({image, label} - set(table.column_names)):
            raise DataError(f"{path} has no column {missing}; its columns are {table.column_names}")
        cells = compute.struct_field(table[image], "bytes").to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(
            f"{path} is not a readable Parquet file with images in the column {image!r}: {error}"
        ) from error
    if not cells:
        raise DataError(f"{path} contains no rows")
    x = read_images([(f"{path}, row {i}", BytesIO(cell or b"")) for i, cell in enumerate(cells)])
    y = labels_from_zero(path, table[label].to_numpy(), classes)
    about = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}"))
    names = about.get("info", {}).get("features", {}).get(label, {}).get("names")
    return {"x": x, "y": y, "classes": np.array(names or [str(c) for c in range(classes)])}
