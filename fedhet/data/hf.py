"""Datasets in Hugging Face's formats that are on this machine, loaded by flwr-datasets."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedhet.core import check
from fedhet.core.errors import DataError
from fedhet.data.array_cache import Arrays, signature
from fedhet.data.arrays import assemble, dataset_arrays
from fedhet.data.dataset import Dataset, Statistic
from fedhet.data.files import find_path, permitted
from fedhet.data.hf_columns import class_names, frame_of, image_column, raw_images
from fedhet.data.tables.data_frames import arrays_of_frames
from fedhet.data.target import Classes
from fedhet.data.tokens import Texts

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
    text: str | None,
    tokenizer: str | None,
    max_length: int,
    label: str | Sequence[str],
    target: str | None,
    owner: str | None,
    classes: Classes,
    size: int | None,
    mean: Statistic,
    std: Statistic,
    target_mean: Statistic,
    target_std: Statistic,
) -> Dataset:
    """Images, texts or a table in any format that Hugging Face's `datasets` reads.

    Nothing is downloaded.

    Args:
        path: a folder, absolute or under `data_dir`, or a name on the Hub (`ylecun/mnist`) that is
            in Hugging Face's cache.
        subset: one of the dataset's configurations; None: its default.
        train, test: names of splits. Without `test`, `test_fraction` of `train` is the global test
            set, whatever the seed.
        test_fraction: the fraction of `train` that is held out where `test` is None.
        features: the column of images, or a list of columns of numbers; None: the only column of
            images, or else all columns but `label` and `owner`.
        text, tokenizer, max_length: a column of texts in place of the features; see
            `fedhet.data.tokens.Texts`.
        label, target, owner: as for `fedhet.data.tables.table`.
        classes: see `fedhet.data.arrays.dataset_arrays`; None also stands for the names that the
            dataset gives.
        size: resizes images to (size, size).
        mean, std, target_mean, target_std: see `fedhet.data.dataset.Dataset`.

    Raises:
        DataError: the data are not on this machine, are damaged, lack a split or a column, or have
            a bad cell.
    """
    check.number("dataset.test_fraction", test_fraction, open_low=0, open_high=1)
    check.optional(check.integer, "dataset.size", size, low=1)
    check.text("dataset.train", train)
    check.optional(check.text, "dataset.test", test)
    place = _find(data_dir, check.text("dataset.path", path))
    log.info("%s: %s", name, place)
    splits = [train] if test is None else [train, test]
    texts = Texts.of(text, tokenizer, max_length, data_dir, place)
    settings: dict[str, Any] = {
        "features": features,
        "label": label,
        "target": target,
        "owner": owner,
        "classes": classes,
        "test_fraction": test_fraction,
        "size": size,
    }

    def read() -> Arrays:
        # `datasets` keeps a copy of its own in this cache; ours is enough.
        with tempfile.TemporaryDirectory() as scratch:
            return _read(_load_splits(place, subset, splits, scratch), texts=texts, **settings)

    key = {
        "loader": "hf",
        "subset": subset,
        "splits": splits,
        **settings,
        "files": signature(sorted(file for file in place.rglob("*") if file.is_file())),
    }
    if texts is not None:
        key |= texts.key
        mean, std = (0.0,), (1.0,)  # tokens are not normalised
    return assemble(name, key, read, mean, std, target_mean=target_mean, target_std=target_std)


def _find(data_dir: str, path: str) -> Path:
    """The folder `path`, or else that of the Hub's dataset `path` in Hugging Face's cache."""
    hint = (
        f"It is not in Hugging Face's cache either. Get it with: hf download --repo-type dataset"
        f" {path}, or name a folder in dataset.path"
    )
    try:
        return find_path(data_dir, path, hint)
    except DataError as missing:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            return permitted(
                Path(snapshot_download(path, repo_type="dataset", local_files_only=True))
            )
        except (HFValidationError, LocalEntryNotFoundError):
            raise missing from None


def _load_splits(
    place: Path, subset: str | None, splits: Sequence[str], cache: str
) -> dict[str, datasets.Dataset]:
    """The splits by their source for messages, the training split first."""
    import datasets
    from flwr_datasets import FederatedDataset

    datasets.disable_progress_bars()
    try:
        saved = _saved(place)
        if saved is not None:
            _check_splits(place, saved, splits)
            return {f"{place}, split {split!r}": saved[split] for split in splits}
        federated = FederatedDataset(
            dataset=str(place),
            subset=subset,
            partitioners=dict.fromkeys(splits, 1),
            shuffle=False,
            cache_dir=cache,
        )
        # `FederatedDataset.load_split` would report its use to Flower
        return {
            f"{place}, split {split!r}": federated.partitioners[split].dataset for split in splits
        }
    except DataError:
        raise
    except (OSError, KeyError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{place} is damaged, or not a dataset with the splits {', '.join(splits)}:"
            f" {error.__cause__ or error}"
        ) from error


def _check_splits(place: Path, saved: Collection[str], splits: Sequence[str]) -> None:
    for split in splits:
        if split not in saved:
            raise DataError(
                f"{place} has no split {split!r}; it has {', '.join(saved)}. Without a test split,"
                " dataset.test=null holds out dataset.test_fraction of the samples"
            )


def _saved(place: Path) -> dict[str, datasets.Dataset] | None:
    """The splits of a folder that `save_to_disk` wrote, or None for any other folder.

    A dataset that was saved without splits is the split "train".
    """
    import datasets

    if (place / "dataset_dict.json").is_file():
        return dict(datasets.DatasetDict.load_from_disk(str(place)))
    if (place / "state.json").is_file() and (place / "dataset_info.json").is_file():
        return {"train": datasets.Dataset.load_from_disk(str(place))}
    return None


def _read(
    parts: Mapping[str, datasets.Dataset],
    *,
    features: str | Sequence[str] | None,
    texts: Texts | None,
    label: str | Sequence[str],
    target: str | None,
    owner: str | None,
    classes: Classes,
    test_fraction: float,
    size: int | None,
) -> Arrays:
    """The dataset's arrays of what `_load_splits` returns; see `hf`."""
    train_source = next(iter(parts))
    columns = parts[train_source].features
    names = None
    if classes is None and target in (None, "class", "labels"):
        names, several = class_names(columns, label)
        classes = names if several else len(names) if names else None
    image = None if texts is not None else image_column(features, columns, train_source)
    if image is None:
        arrays = arrays_of_frames(
            [(source, frame_of(part, label)) for source, part in parts.items()],
            features=features,
            texts=texts,
            label=label,
            target=target,
            owner=owner,
            classes=classes,
            test_fraction=test_fraction,
        )
    else:
        train, *tests = (
            raw_images(source, part, image, label, owner, size, test=source != train_source)
            for source, part in parts.items()
        )
        test = tests[0] if tests else None
        arrays = dataset_arrays(train, test, classes, test_fraction, target)
    return arrays | {"classes": np.array(names)} if names else arrays
