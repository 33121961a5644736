"""Datasets of the Hugging Face Hub that are on this machine, and folders in its formats, loaded by
flwr-datasets."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from glob import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedhet import check
from fedhet.data.array_cache import Arrays, signature, stored
from fedhet.data.arrays import Classes, Part, Standard, assemble, gather
from fedhet.data.dataset import Dataset
from fedhet.data.decode import read_images
from fedhet.data.files import find
from fedhet.data.tables import columns_of, values_of
from fedhet.errors import ConfigError, DataError

if TYPE_CHECKING:
    import datasets

log = logging.getLogger("fedhet.data")


def hf(
    *,
    name: str,
    data_dir: str,
    path: str | None,
    subset: str | None,
    train: str,
    test: str | None,
    test_fraction: float,
    features: str | Sequence[str] | None,
    label: str,
    owner: str | None,
    classes: Classes,
    size: int | None,
    mean: Standard,
    std: Standard,
) -> Dataset:
    """Images or a table in any format that Hugging Face's `datasets` reads. Nothing is downloaded.

    Args: path: a folder, absolute or under `data_dir`, or a name on the Hub (`ylecun/mnist`) that
        is in Hugging Face's cache. subset: which of a dataset's configurations; None: its default.
        train, test: names of splits. Without `test`, `test_fraction` of `train` is the global test
        set, whatever the seed. features: the column of images, or a list of columns of numbers;
        None: the only column of images, or else all but `label` and `owner`. label, owner: columns,
        as for `fedhet.data.tables.table`. classes: None also stands for the names that the data
        give. size: resizes images to (size, size). mean, std: see `fedhet.data.arrays.assemble`.

    Raises: DataError: the data are not on this machine, or damaged, or lack a split or column, or
        have a bad cell.
    """
    check.number("dataset.test_fraction", test_fraction, open_low=0, open_high=1)
    check.optional(check.integer, "dataset.size", size, low=1)
    check.text("dataset.train", train)
    check.optional(check.text, "dataset.test", test)
    place = _place(data_dir, check.text("dataset.path", path))
    log.info("%s: %s", name, place)
    splits = [train] if test is None else [train, test]
    settings: dict[str, Any] = {
        "features": features,
        "label": label,
        "owner": owner,
        "classes": classes,
        "test_fraction": test_fraction,
    }

    def make() -> Arrays:
        # of `datasets`, which would keep a second copy
        with tempfile.TemporaryDirectory() as scratch:
            found = _load(place, subset, splits, scratch)
            return _arrays(
                [(f"{place}, split {split!r}", part) for split, part in found.items()],
                size=size,
                **settings,
            )

    files = sorted(file for file in place.rglob("*") if file.is_file())
    key = {
        "loader": "hf",
        "subset": subset,
        "splits": splits,
        "size": size,
        **settings,
        "files": signature(files),
    }
    return assemble(name, stored(name, key, make), mean, std)


def _place(data_dir: str, path: str) -> Path:
    """The folder `path`, else that of the Hub's dataset `path` in Hugging Face's cache."""
    folder = Path(path)
    hint = (
        f"Nor is it in Hugging Face's cache. Get it with: hf download --repo-type dataset {path},"
        " or name a folder in dataset.path"
    )
    try:
        return find(data_dir, [(str(folder.parent), [escape(folder.name)])], hint) / folder.name
    except DataError as missing:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            return Path(snapshot_download(path, repo_type="dataset", local_files_only=True))
        except (HFValidationError, LocalEntryNotFoundError):
            raise missing from None


def _load(
    place: Path, subset: str | None, splits: Sequence[str], cache: str
) -> dict[str, datasets.Dataset]:
    import datasets
    from flwr_datasets import FederatedDataset

    datasets.disable_progress_bars()
    try:
        found = FederatedDataset(
            dataset=str(place),
            subset=subset,
            partitioners=dict.fromkeys(splits, 1),
            shuffle=False,
            cache_dir=cache,
        )
        # `load_split` would report its use to Flower
        return {split: found.partitioners[split].dataset for split in splits}
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{place} is damaged, or no dataset with the splits {', '.join(splits)}:"
            f" {error.__cause__ or error}"
        ) from error


def _arrays(
    parts: Sequence[tuple[str, datasets.Dataset]],
    *,
    features: str | Sequence[str] | None,
    label: str,
    owner: str | None,
    classes: Classes,
    test_fraction: float,
    size: int | None,
) -> Arrays:
    import datasets

    where, columns = parts[0][0], parts[0][1].features
    images = [column for column, kind in columns.items() if isinstance(kind, datasets.Image)]
    names = getattr(columns.get(label), "names", None)  # of a ClassLabel, whose values are numbers
    count = len(names) if classes is None and names else classes
    if features is None and len(images) > 1:
        raise ConfigError(
            f"dataset.features=null: {where} has several columns of images, choose from:"
            f" {', '.join(images)}"
        )
    image = (
        features
        if isinstance(features, str)
        else images[0]
        if features is None and images
        else None
    )
    if image is None:
        frames = [(where, part.to_pandas()) for where, part in parts]
        arrays = columns_of(
            frames,
            features=features,
            label=label,
            owner=owner,
            classes=count,
            test_fraction=test_fraction,
        )
    else:
        found = [
            _images(where, part, image, label, owner if i == 0 else None, size)
            for i, (where, part) in enumerate(parts)
        ]
        arrays = gather(found[0], found[1] if len(found) > 1 else None, count, test_fraction)
    return arrays | ({"classes": np.array(names)} if classes is None and names else {})


def _images(
    where: str, part: datasets.Dataset, image: str, label: str, owner: str | None, size: int | None
) -> Part:
    import datasets

    for column in [image, label] if owner is None else [image, label, owner]:
        if column not in part.features:
            raise DataError(f"{where} has no column {column!r}; it has {', '.join(part.features)}")
    if not isinstance(part.features[image], datasets.Image):
        raise DataError(
            f"{where}, column {image!r} holds {part.features[image]}, no images; a list of columns"
            f" is a table: [{image}]"
        )
    cells = enumerate(part.cast_column(image, datasets.Image(decode=False))[image])
    files = [(f"{where}, row {row}", _file(cell)) for row, cell in cells]
    frame = part.remove_columns(image).to_pandas()
    return Part(
        read_images(files, size),
        values_of(frame, label, where),
        None if owner is None else values_of(frame, owner, where),
        (where, f"{where}, column {label!r}"),
    )


def _file(cell: dict[str, Any] | None) -> Path | BytesIO:
    """Of an image, which a file of its own or the cell holds; a missing one is an empty file."""
    if cell is None:
        return BytesIO()
    return Path(cell["path"]) if cell["bytes"] is None else BytesIO(cell["bytes"])
