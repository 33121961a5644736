"""Datasets in Hugging Face's formats, from this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedhet.core import check
from fedhet.core.errors import ConfigError, DataError
from fedhet.data.array_cache import Arrays, signature
from fedhet.data.arrays import Classes, assemble
from fedhet.data.dataset import REFUSE, Dataset
from fedhet.data.encoding import Cells
from fedhet.data.files import find_path, log, permitted
from fedhet.data.images import decoder, read_images
from fedhet.data.tables import Columns, check_columns, known_owner
from fedhet.data.tokens import Texts

if TYPE_CHECKING:
    import datasets
    import pandas


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
    categories: Mapping[str, Sequence[Any]] | None = None,
    missing: str = REFUSE,
    **statistics: Any,
) -> Dataset:
    """Load images, texts or a table in any format that Hugging Face's `datasets` reads.

    Nothing is downloaded.

    Args:
        path: a folder, absolute or under `data_dir`, or a name on the Hub (`ylecun/mnist`) that is
            in Hugging Face's cache.
        subset: one of the dataset's configurations; None: its default.
        train, test: names of splits. Without `test`, the global test set is `test_fraction` of
            `train`, the same samples for every seed.
        test_fraction: the fraction of `train` that is held out if `test` is None.
        features: the column of images, or a list of columns of numbers; None: the only column of
            images, or all columns except `label` and `owner`.
        text, tokenizer, max_length: a column of texts instead of the features; see
            `fedhet.data.tokens.Texts`.
        label, target, owner: see `fedhet.data.tables.Columns`.
        classes: see `fedhet.data.arrays.dataset_arrays`. With None, the names that the dataset
            itself gives apply first.
        size: resizes images to (size, size).
        categories, missing: of a table, see `fedhet.data.encoding.Cells`.
        statistics: mean, std, target_mean, target_std, see `fedhet.data.dataset.Dataset`.

    Raises:
        DataError: the data are not on this machine, are damaged, lack a split or a column, or have
            an invalid value.
    """
    check.installed(f"dataset={name}", "datasets", extra="hf")
    check.number("dataset.test_fraction", test_fraction, open_low=0, open_high=1)
    check.optional(check.integer, "dataset.size", size, low=1)
    check.text("dataset.train", train)
    check.optional(check.text, "dataset.test", test)
    place = _find(data_dir, check.text("dataset.path", path))
    log.info("%s: %s", name, place)
    splits = [train] if test is None else [train, test]
    texts = Texts.of(text, tokenizer, max_length, data_dir, place)
    columns = Columns(
        label, target, classes, features, texts, owner, test_fraction, Cells(categories, missing)
    )

    def read() -> Arrays:
        # `datasets` stores a copy in this folder, which is deleted: our own cache is enough.
        with tempfile.TemporaryDirectory() as scratch:
            return _read(_load_splits(place, subset, splits, scratch), columns, size)

    key = {
        "loader": "hf",
        "subset": subset,
        "splits": splits,
        **columns.key,
        "size": size,
        **decoder(),
        "files": signature(sorted(file for file in place.rglob("*") if file.is_file())),
    }
    return assemble(name, key, read, missing=missing, **statistics)


def _find(data_dir: str, path: str) -> Path:
    """Find the folder `path`, or the dataset of this name on the Hub in Hugging Face's cache."""
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
    """Load the splits: name for messages -> split, the training split first.

    A dataset that `save_to_disk` wrote without splits counts as the split "train".
    """
    import datasets

    datasets.disable_progress_bars()
    try:
        if (place / "dataset_dict.json").is_file():
            found = datasets.DatasetDict.load_from_disk(str(place))
        elif (place / "state.json").is_file() and (place / "dataset_info.json").is_file():
            found = {"train": datasets.Dataset.load_from_disk(str(place))}
        else:
            found = datasets.load_dataset(str(place), subset, cache_dir=cache)
            if any(found[split].info.builder_name == "csv" for split in found):
                log.warning(
                    "%s: in csv files, `datasets` drops the zeros of codes such as 01, and reads"
                    " words such as NA and None as missing values; dataset=csv keeps both",
                    place,
                )
    except (OSError, KeyError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{place} is damaged, or not a dataset: {error.__cause__ or error}"
        ) from error
    for split in splits:
        if split not in found:
            raise DataError(
                f"{place} has no split {split!r}; it has {', '.join(found)}. Without a test split,"
                " dataset.test=null holds out dataset.test_fraction of the samples"
            )
    return {f"{place}, split {split!r}": found[split] for split in splits}


def _read(parts: Mapping[str, datasets.Dataset], columns: Columns, size: int | None) -> Arrays:
    """Return the dataset's arrays from the splits that `_load_splits` returns; see `hf`."""
    import datasets

    train_source = next(iter(parts))
    kinds = parts[train_source].features
    named = columns.classes is None and columns.target in (None, "class", "labels")
    names = _class_names(kinds, columns.label) if named else []
    if names:
        columns = replace(columns, classes=names)
    image = columns.features if isinstance(columns.features, str) else None
    if columns.features is None and columns.texts is None:
        images = [column for column, kind in kinds.items() if isinstance(kind, datasets.Image)]
        if len(images) > 1:
            raise ConfigError(
                f"dataset.features=null: {train_source} has several columns of images; set"
                f" dataset.features to one of: {', '.join(images)}"
            )
        image = images[0] if images else None
    if image is None:
        arrays = columns.arrays([(source, _frame(part, columns)) for source, part in parts.items()])
    else:
        columns.cells.inputs([])  # an image has no categories
        raw = []
        for source, part in parts.items():
            test = source != train_source
            owners = [columns.owner] if columns.owner is not None and not test else []
            check_columns(source, part.features, [image, *columns.labels, *owners])
            if not isinstance(part.features[image], datasets.Image):
                raise DataError(
                    f"{source}, column {image!r} holds {part.features[image]}, not images; for a"
                    f" table, set dataset.features to a list ([{image}]); for texts, set"
                    " dataset.text"
                )
            frame = _frame(part.remove_columns(image), columns)
            owner = known_owner(frame, columns.owner) if test else columns.owner
            cells = part.cast_column(image, datasets.Image(decode=False))[image]
            files = [(f"{source}, row {row}", _image_file(cell)) for row, cell in enumerate(cells)]
            mode = part.features[image].mode  # `datasets` converts to it
            x = read_images(files, size, mode if mode in ("L", "RGB") else None)
            raw.append(columns.samples(x, frame, source, owner))
        arrays = columns.encoded(raw)
    return arrays | {"classes": np.array(names)} if names else arrays


def _class_names(columns: datasets.Features, column: str | Sequence[str]) -> list[str]:
    """Return the names that the dataset gives to the classes in a column (or in its lists)."""
    kind = columns.get(column) if isinstance(column, str) else None
    return list(getattr(getattr(kind, "feature", kind), "names", None) or ())


def _frame(part: datasets.Dataset, columns: Columns) -> pandas.DataFrame:
    """Return the table, with class names instead of numbers in columns that declare such names."""
    frame = part.to_pandas()
    declared: dict[str, Sequence[str]] = dict(columns.cells.names)
    if isinstance(columns.label, str) and not isinstance(columns.classes, int | None):
        declared[columns.label] = columns.classes
    for column, given in declared.items():
        names = _class_names(part.features, column)
        if {*names} & {*given}:
            frame[column] = [_by_name(cell, names) for cell in frame[column]]
    return frame


def _by_name(cell: Any, names: Sequence[str]) -> Any:
    """Return the name of a class, or a list of names for a list; None for a missing value."""
    if isinstance(cell, np.ndarray):
        return [_by_name(one, names) for one in cell]
    return names[int(cell)] if cell is not None and cell >= 0 else None  # NaN is not >= 0


def _image_file(cell: dict[str, Any] | None) -> Path | BytesIO:
    """Return the file of an image, on disk or in memory; a missing image is an empty file."""
    if cell is None:
        return BytesIO()
    return Path(cell["path"]) if cell["bytes"] is None else BytesIO(cell["bytes"])
