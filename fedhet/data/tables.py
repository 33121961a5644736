"""The user's own data: arrays in an npz file, or tables in csv or Parquet files.

The loaders `fedhet.data.tables.npz` and `fedhet.data.tables.table` are Hydra targets
(conf/dataset). Sites read their own files by the same functions. Messages count the rows of a csv
file as editors do (the header is row 1), and the rows of other files from 0.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedhet.core import check
from fedhet.core.errors import ConfigError, DataError
from fedhet.core.objects import are_pixels
from fedhet.data.array_cache import Arrays, signature
from fedhet.data.arrays import (
    Classes,
    RawSamples,
    assemble,
    check_rows,
    class_names,
    dataset_arrays,
    listed,
    plain,
)
from fedhet.data.dataset import REFUSE, Dataset
from fedhet.data.encoding import Cells
from fedhet.data.files import check_memory, find_file, log
from fedhet.data.frames import CsvFormat, read_frame
from fedhet.data.tokens import Texts

if TYPE_CHECKING:
    import pandas


# The names that pandas gives to unnamed columns of csv and Parquet files.
UNNAMED = re.compile(r"\s*|Unnamed: \d+.*|__index_level_\d+__")
# np.load raises these for a damaged file, and for a file that contains objects.
_DAMAGE = (
    OSError,
    ValueError,
    EOFError,
    MemoryError,
    TypeError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)


# ---- tables


def table(
    *,
    name: str,
    data_dir: str,
    train: str,
    test: str | None,
    test_fraction: float,
    features: Sequence[str] | None,
    text: str | None,
    tokenizer: str | None,
    max_length: int,
    label: str | Sequence[str],
    target: str | None,
    owner: str | None,
    classes: Classes,
    categories: Mapping[str, Sequence[Any]] | None = None,
    missing: str = REFUSE,
    read: Mapping[str, Any] | None = None,
    **statistics: Any,
) -> Dataset:
    """Load a dataset from csv files (with a header) or Parquet files.

    Args:
        train, test: the files' paths, absolute or under `data_dir`. Without `test`, the global test
            set is `test_fraction` of the rows of `train`, the same rows for every seed.
        text, tokenizer, max_length: a column of texts instead of the features; see
            `fedhet.data.tokens.Texts`.
        test_fraction, features, label, target, owner, classes: see `Columns`.
        categories, missing: see `fedhet.data.encoding.Cells`.
        read: the format of csv files, see `fedhet.data.frames.CsvFormat`.
        statistics: mean, std, target_mean, target_std, see `fedhet.data.dataset.Dataset`.

    Raises:
        ConfigError: a setting is not allowed, or an input column has no name.
        DataError: a file is damaged or lacks a column, or a value is missing or not a finite
            number; the message names the file, the row and the column.
    """
    check.number("dataset.test_fraction", test_fraction, open_low=0, open_high=1)
    files = {"train": train, "test": test}
    paths = [find_file(data_dir, key, file) for key, file in files.items() if file is not None]
    texts = Texts.of(text, tokenizer, max_length, data_dir, paths[0].parent)
    columns = Columns(
        label, target, classes, features, texts, owner, test_fraction, Cells(categories, missing)
    )
    form = CsvFormat.of(read)
    key = {"loader": "table", **columns.key, "files": signature(paths), "read": form.given}
    return assemble(
        name,
        key,
        lambda: columns.arrays([(str(path), columns.frame(path, form)) for path in paths]),
        missing=missing,
        **statistics,
    )


@dataclass(frozen=True)
class Columns:
    """The roles of a table's columns.

    Args:
        label: the column of labels; or several columns of numbers, or of zeros and ones.
        target: see `fedhet.data.arrays.encoded`.
        classes: see `fedhet.data.arrays.dataset_arrays`.
        features: the input columns, of numbers or categories; None: all except `label` and `owner`.
            A single name (only with `dataset=hf`) is a column of images.
        texts: a column of texts instead of the features.
        owner: the column of natural owners; None: there are no owners.
        test_fraction: the fraction of the rows that is held out if there is no test table.
        cells: how missing values and categories are handled.

    Raises:
        ConfigError: `texts` is combined with a setting for columns of numbers.
    """

    label: str | Sequence[str]
    target: str | None
    classes: Classes
    features: str | Sequence[str] | None = None
    texts: Texts | None = None
    owner: str | None = None
    test_fraction: float = 0.0
    cells: Cells = field(default_factory=Cells)

    def __post_init__(self) -> None:
        single = isinstance(self.label, str) or not isinstance(self.label, Sequence)
        check.each(check.text, "dataset.label", [self.label] if single else self.label)
        check.optional(check.text, "dataset.owner", self.owner)
        if self.texts is not None and (self.features is not None or self.cells.key):
            raise ConfigError(
                f"dataset.text={self.texts.column} with dataset.features={self.features},"
                f" dataset.categories={self.cells.categories} and"
                f" dataset.missing={self.cells.missing}: use either a text, or columns of"
                " numbers and categories"
            )

    @property
    def labels(self) -> list[str]:
        """The names of the label columns."""
        return [self.label] if isinstance(self.label, str) else list(self.label)

    @property
    def key(self) -> dict[str, Any]:
        """Everything that determines a table's arrays, for the cache."""
        return {**vars(self), "texts": self.texts and self.texts.key, "cells": self.cells.key}

    def frame(self, path: Path, form: CsvFormat) -> pandas.DataFrame:
        """Read a table; columns of names and texts keep their text, see `read_frame`."""
        names: dict[str, Collection[str]] = dict(self.cells.names)
        numbers = self.labels
        if isinstance(self.label, str) and not isinstance(self.classes, int | None):
            names[self.label] = class_names(self.classes).tolist()
            numbers = []
        elif self.target != "number":
            names |= dict.fromkeys(self.labels, ())
        if self.owner is not None:
            names[self.owner] = ()
        if self.texts is not None:
            names[self.texts.column] = ()
        frame = read_frame(path, names, form, numbers)
        log.info("%s: %d rows, %d columns", path, *frame.shape)
        return frame

    def arrays(self, frames: Sequence[tuple[str, pandas.DataFrame]]) -> Arrays:
        """Return the arrays of a dataset from one or two tables.

        Args:
            frames: pairs (name for messages, data frame): the training data and, optionally, the
                test data.
        """
        described, raw = self.read(frames)
        return self.encoded(raw) | described

    def read(
        self, frames: Sequence[tuple[str, pandas.DataFrame]]
    ) -> tuple[Arrays, list[RawSamples]]:
        """Return the arrays that describe the inputs, and the samples of each table.

        If `features` is None, the array `unrepeated` names inputs that have a different whole
        number in each row, because such a column may just number the rows.
        """
        (source, frame), *tests = frames
        others = [*self.labels, *([] if self.owner is None else [self.owner])]
        named = self.features or ()
        if isinstance(named, str) or not all(isinstance(column, str) for column in named):
            raise ConfigError(f"dataset.features={named}: must be texts, such as ['0','1']")
        used = [str(column) for column in frame.columns if column not in others]
        by_default = self.texts is None and self.features is None
        if by_default and (unnamed := [column for column in used if UNNAMED.fullmatch(column)]):
            raise ConfigError(
                f"{source}: column {list(frame.columns).index(unnamed[0]) + 1} has no name (pandas"
                f" calls it {unnamed[0]!r}) and may just number the rows; name the inputs:"
                f" dataset.features=[{','.join(c for c in used if c not in unnamed) or '...'}]"
            )
        if self.texts is not None:
            used = [self.texts.column]
        elif self.features is not None:
            used = list(self.features)
        if not used or set(used) & set(others):
            raise ConfigError(
                f"dataset.features={used}: must name at least one column, but not the label"
                f" or the owner ({', '.join(others)})"
            )
        owners = [self.owner, *(known_owner(test, self.owner) for _, test in tests)]
        for (source, frame), own in zip(frames, owners, strict=True):
            check_columns(source, frame.columns, [*used, *self.labels, *([own] if own else [])])
        described: Arrays = {"columns": np.array(used)}
        if self.texts is None:
            described = {"columns": np.array(self.cells.inputs(used))}
            if by_default:
                log.info("%s: dataset.features=null, so the inputs are: %s", source, listed(used))
                if numbered := unrepeated(frame, [c for c in used if c not in self.cells.names]):
                    described["unrepeated"] = np.array(numbered)
            xs = [self.cells.read(frame, used, source) for source, frame in frames]
        else:
            words = {source: text_values(frame, used[0], source) for source, frame in frames}
            xs, tokens = self.texts.encoded(words)
            described |= tokens
        parts = zip(xs, frames, owners, strict=True)
        return described, [self.samples(x, frame, source, own) for x, (source, frame), own in parts]

    def samples(
        self, x: np.ndarray, frame: pandas.DataFrame, source: str, owner: str | None
    ) -> RawSamples:
        """Return samples with the inputs `x`, and the labels and owners of a data frame."""
        columns = self.labels
        y = column_values(frame, columns[0], source, lists=True)
        named = f"{source}, column {columns[0]!r}"
        if not isinstance(self.label, str):
            y = np.stack([column_values(frame, column, source) for column in columns], axis=1)
            named = f"{source}, columns {columns}"
        owners = None if owner is None else column_values(frame, owner, source)
        return self.cells.kept(RawSamples(x, y, owners, source, named, tuple(columns)))

    def encoded(self, raw: Sequence[RawSamples]) -> Arrays:
        """Return the arrays of a dataset from training samples and, optionally, test samples."""
        test = raw[1] if len(raw) > 1 else None
        return dataset_arrays(raw[0], test, self.classes, self.test_fraction, self.target)


def unrepeated(frame: pandas.DataFrame, columns: Iterable[str]) -> list[str]:
    """Return the columns with at least 20 values that are all whole numbers and all different."""
    from pandas import to_numeric

    found = []
    for column in columns:
        cells = frame[column].dropna()
        if len(cells) >= 20 and plain(cells.to_numpy()).all():
            numbers = to_numeric(cells, errors="coerce")
            if numbers.is_unique and (numbers % 1 == 0).all():
                found.append(column)
    return found


def check_columns(source: str, present: Iterable[str], required: Iterable[str]) -> None:
    """Check that a table has these columns.

    Raises:
        DataError: one is missing.
    """
    names = [str(column) for column in present]
    for column in required:
        if column not in names:
            shown = ", ".join(name if name == name.strip() else repr(name) for name in names)
            raise DataError(f"{source} has no column {column!r}; it has {shown}")


def known_owner(frame: pandas.DataFrame, owner: str | None) -> str | None:
    """Return `owner` if the test set has this column without missing values, else None."""
    return owner if owner in frame.columns and not frame[owner].isna().any() else None


def column_values(
    frame: pandas.DataFrame, column: str, source: str, *, lists: bool = False
) -> np.ndarray:
    """Return the values (n,) of a column of labels or owners, with numpy's dtype.

    Args:
        frame: the table.
        column: the name of the column.
        source: the table's name in messages.
        lists: whether all values may be lists; the array then holds objects.

    Raises:
        DataError: a value is missing, or is neither a number, a text, nor an allowed list.
    """
    cells = frame[column].to_numpy(object)
    empty = np.array([isinstance(cell, str) and not cell for cell in cells])
    present = frame[column].notna().to_numpy() & ~empty
    message = "the value is missing (empty, or a word such as NA); expected a value"
    check_rows(source, present, lambda row: message, column)
    values = frame[column].to_numpy()
    if values.dtype == object:
        are_lists = np.array([isinstance(value, list | np.ndarray) for value in values])
        good = are_lists if lists and are_lists.all() else plain(values)
        check_rows(source, good, lambda row: f"{values[row]}; expected a number or text", column)
        numbers = not any(isinstance(value, str | list | np.ndarray) for value in values)
        if numbers and any(isinstance(value, Decimal) for value in values):
            values = values.astype(np.float64)
    return values


def text_values(frame: pandas.DataFrame, column: str, source: str) -> list[str]:
    """Return the values of a column of texts.

    Raises:
        DataError: a value is missing, or is not a text.
    """
    values = column_values(frame, column, source).tolist()
    good = [isinstance(value, str) for value in values]
    check_rows(source, good, lambda row: f"{values[row]!r}; expected a text", column)
    return values


# ---- npz files


def npz(
    *,
    name: str,
    data_dir: str,
    file: str,
    x_train: str,
    y_train: str,
    x_test: str,
    y_test: str,
    owner: str | None,
    owner_test: str | None,
    target: str | None,
    classes: Classes,
    text: bool,
    vocabulary: int | None,
    padding: int | None,
    missing: str = REFUSE,
    **statistics: Any,
) -> Dataset:
    """Load a dataset from an npz file.

    Args:
        file: the file's path, absolute or under `data_dir`.
        x_train, x_test: the names of arrays: a table (n, F); images (n, H, W) or (n, C, H, W) as
            uint8 or floats in [0, 1]; or, with `text`, token numbers (n, T).
        y_train, y_test: the names of arrays: classes (n,), whole numbers or text; numbers (n,) or
            (n, K); or labels (n, L) of zeros and ones.
        owner: the name of an array (n,), the natural owner of each training sample; None: there
            are no owners.
        owner_test: the same for test samples; only `partition.pool_test=true` uses it.
        target: see `fedhet.data.arrays.encoded`. With None, the file's array `target` applies
            first, then "next_char" if `text` is true.
        classes: see `fedhet.data.arrays.dataset_arrays`. With None, the file's array `classes`
            applies first: the names of 0 .. C-1.
        text: whether the inputs are token numbers.
        vocabulary, padding: only for texts, see `fedhet.data.dataset.Dataset`. With None, the
            file's arrays of these names apply. If the file has none, the vocabulary is the classes
            with target=next_char, otherwise the tokens up to the largest one that occurs; there is
            no padding.
        missing: how NaN in a table are handled, see `fedhet.data.encoding.Cells`.
        statistics: mean, std, target_mean, target_std, see `fedhet.data.dataset.Dataset`. With
            "auto", the file's arrays of these names apply first.

    Raises:
        DataError: the file is damaged, lacks an array, or an array has invalid values; the message
            names the array and the row.
    """
    check.boolean("dataset.text", text)
    check.optional(check.integer, "dataset.vocabulary", vocabulary, low=1)
    check.optional(check.integer, "dataset.padding", padding, low=0)
    if owner_test is not None and owner is None:
        raise ConfigError(
            f"dataset.owner_test={owner_test}: set dataset.owner, too, to the array of the"
            " training samples' owners"
        )
    names = {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}
    owners = {"owner": owner, "owner_test": owner_test}
    names |= {key: array for key, array in owners.items() if array is not None}
    given = {"vocabulary": vocabulary, "padding": padding}
    path = find_file(data_dir, "file", file)

    def read() -> Arrays:
        found = load_arrays(path, names)
        how: Any = {"text": text, "missing": missing}
        train = array_samples(path, found, x_train, y_train, owner=owner, **how)
        test = array_samples(path, found, x_test, y_test, owner=owner_test, **how)
        keys = [key for key in _DESCRIBES if classes is None or key != "classes"]
        stated = described(path, found, keys)
        kind = str(stated.pop("target", "next_char" if text else "")) or None
        if target == "number":
            stated.pop("classes", None)
        known = len(class_names(stated["classes"].tolist())) if "classes" in stated else classes
        arrays = dataset_arrays(train, test, known, target=target or kind) | stated
        if not text:
            return arrays
        arrays |= {key: np.array(value) for key, value in given.items() if value is not None}
        if "vocabulary" not in arrays and arrays["target"][0] != "next_char":
            largest = max(int(arrays[part].max()) for part in ("x", "test_x"))
            arrays["vocabulary"] = np.array(max(largest, int(arrays.get("padding", 0))) + 1)
        return arrays

    settings = {"names": names, "target": target, "classes": classes, "text": text, **given}
    key = {"loader": "npz", **settings, "missing": missing, "files": signature([path])}
    return assemble(name, key, read, missing=missing, **statistics)


def array_samples(
    path: Path,
    arrays: Arrays,
    x: str,
    y: str,
    *,
    text: bool,
    owner: str | None = None,
    missing: str = REFUSE,
) -> RawSamples:
    """Return the samples in the named arrays of an npz file.

    Args:
        path, arrays: the file, and its arrays.
        x, y, owner: the names of the arrays.
        text: whether x are token numbers.
        missing: how NaN in a table are handled, see `fedhet.data.encoding.Cells`.
    """
    source, cells = f"{path}, array {x!r}", Cells(missing=missing)
    inputs = numeric_inputs(arrays[x], source, text=text, missing=missing != REFUSE)
    owners = None if owner is None else arrays[owner]
    return cells.kept(RawSamples(inputs, arrays[y], owners, source, f"{path}, array {y!r}"))


def load_arrays(path: Path, names: Mapping[str, str], optional: Iterable[str] = ()) -> Arrays:
    """Load the named arrays of an npz file, and the arrays that describe them.

    Args:
        path: the file.
        names: setting -> the name of an array that the file must have.
        optional: the names of arrays that the file may have.

    Raises:
        DataError: the file is damaged, lacks an array, or is too large for the memory.
    """
    with opened_npz(path) as file:
        for key, array in names.items():
            if array not in file.files:
                raise DataError(
                    f"{path} has no array {array!r} (dataset.{key}); it has {', '.join(file.files)}"
                )
        wanted = {*names.values(), *optional, *_DESCRIBES} & {*file.files}
        check_arrays(file, wanted)
        return {name: file[name] for name in file.files if name in wanted}


@contextmanager
def opened_npz(path: Path) -> Iterator[np.lib.npyio.NpzFile]:
    """Open an npz file for a block, and convert its errors to DataError.

    Raises:
        DataError: the file is damaged, or not an npz file of numbers and text.
    """
    try:
        with np.load(path) as file:
            yield file
    except (ConfigError, DataError):
        raise
    except _DAMAGE as error:
        raise DataError(
            f"{path} is damaged, or not an npz file of numbers and text: {error}"
        ) from error


def check_arrays(file: np.lib.npyio.NpzFile, names: Iterable[str]) -> None:
    """Refuse arrays that exceed this machine's memory: a small file may unpack to any size.

    numpy itself refuses an array if its header claims more data than the file has.

    Raises:
        DataError: the arrays are too large; the message names their size.
    """
    members = file.zip.infolist() if file.zip else []
    sizes = {member.filename.removesuffix(".npy"): member.file_size for member in members}
    claimed = sum(sizes[name.removesuffix(".npy")] for name in names)
    check_memory(claimed, f"the content of {file.zip and file.zip.filename}")


# Arrays of an npz file that describe the other arrays, as `python -m fedhet data export` writes
# them: name -> (number of dimensions, numpy's kinds of dtypes).
_DESCRIBES = {
    "target": (0, "U"),
    **dict.fromkeys(("classes", "numbers"), (1, "biufU")),
    **dict.fromkeys(("mean", "std", "target_mean", "target_std"), (1, "iuf")),
    **dict.fromkeys(("vocabulary", "padding"), (0, "iu")),
}


def described(path: Path, arrays: Arrays, keys: Iterable[str]) -> Arrays:
    """Return the descriptive arrays with the given keys that the file has.

    Their values are checked later, as settings are.

    Raises:
        DataError: an array has the wrong dimensions or dtype.
    """
    found = {key: arrays[key] for key in keys if key in arrays}
    for key, values in found.items():
        dimensions, kinds = _DESCRIBES[key]
        if values.ndim != dimensions or values.dtype.kind not in kinds:
            raise DataError(
                f"{path}, array {key!r} is {values.dtype} {values.shape}; expected {dimensions}"
                f" dimensions, and a dtype of numpy's kinds {', '.join(kinds)}"
            )
    return found


def numeric_inputs(
    x: np.ndarray, source: str, *, text: bool = False, missing: bool = False
) -> np.ndarray:
    """Return a table (n, F) as float64, or images (n, C, H, W) as uint8 or float32.

    Texts (n, T) are returned as int64 token numbers.

    Args:
        x: the array.
        source: the array's name in messages.
        text: whether x are token numbers.
        missing: whether a table may have NaN.

    Raises:
        DataError: the array has another shape or dtype, or a value is out of range.
    """
    if text:
        if x.ndim != 2 or not x.shape[1] or x.dtype.kind not in "iu":
            raise DataError(
                f"{source} is {x.dtype} {x.shape}; dataset.text=true expects token numbers (n, T)"
            )
        return x.astype(np.int64)
    kinds = "biuf" if x.ndim == 2 else "f"
    channels_last = x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3)
    typed = x.dtype.kind in kinds or x.dtype == np.uint8
    if x.ndim not in (2, 3, 4) or 0 in x.shape[1:] or channels_last or not typed:
        raise DataError(
            f"{source} is {x.dtype} {x.shape}; expected numbers (n, F), or images (n, H, W) or"
            " (n, C, H, W), channels first, as uint8 or as floats in [0, 1]"
        )
    if x.ndim == 3:
        x = x[:, None]
    if are_pixels(x):
        return x
    numbers: Any = x.astype(np.float64 if x.ndim == 2 else np.float32)
    if x.ndim == 2:
        valid = (np.abs(numbers) <= np.finfo(np.float32).max) | (np.isnan(numbers) & missing)
        expected = "finite numbers"
    else:
        valid = (numbers >= 0) & (numbers <= 1)
        expected = "pixels in [0, 1], or uint8"
    if not valid.all():
        row, *position = np.argwhere(~valid)[0].tolist()
        raise DataError(
            f"{source}, row {row}: {x[(row, *position)]} at {position}; expected {expected}"
        )
    return numbers
