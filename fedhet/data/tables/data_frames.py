"""Tables: csv and Parquet files, and any other data frame with columns of numbers."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedhet.core import check
from fedhet.core.errors import ConfigError, DataError
from fedhet.data.array_cache import Arrays, signature
from fedhet.data.arrays import assemble, dataset_arrays
from fedhet.data.dataset import Dataset, Statistic
from fedhet.data.files import find_file
from fedhet.data.raw_samples import RawSamples, place
from fedhet.data.tables.npz_file import check_memory
from fedhet.data.target import Classes
from fedhet.data.tokens import Texts

if TYPE_CHECKING:
    import pandas

SUFFIXES = (".csv", ".parquet")


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
    mean: Statistic,
    std: Statistic,
    target_mean: Statistic,
    target_std: Statistic,
) -> Dataset:
    """The dataset of csv files (with a header) or Parquet files.

    Args:
        train, test: the files' paths, absolute or under `data_dir`. Without `test`, the global test
            set is `test_fraction` of the rows of `train`, the same rows whatever the seed.
        test_fraction: the fraction of the rows that is held out where `test` is None.
        features: the columns (F,) that the model sees, all of numbers; None: all but `label` and
            `owner`.
        text, tokenizer, max_length: a column of texts in place of the features; see
            `fedhet.data.tokens.Texts`.
        label: the column of what is learned, or several columns of numbers, or of zeros and ones.
        target: see `fedhet.data.target.encoded`.
        owner: the column of natural owners; None: there are no owners.
        classes: see `fedhet.data.arrays.dataset_arrays`.
        mean, std, target_mean, target_std: see `fedhet.data.dataset.Dataset`.

    Raises:
        DataError: a file is damaged, lacks a column, or has a cell that is missing or not a finite
            number; the message names the file, the row and the column.
    """
    check.number("dataset.test_fraction", test_fraction, open_low=0, open_high=1)
    paths = [find_file(data_dir, "train", train)]
    if test is not None:
        paths.append(find_file(data_dir, "test", test))
    texts = Texts.of(text, tokenizer, max_length, data_dir, paths[0].parent)
    settings: dict[str, Any] = {
        "features": features,
        "label": label,
        "target": target,
        "owner": owner,
        "classes": classes,
        "test_fraction": test_fraction,
    }

    def read() -> Arrays:
        frames = [(str(path), read_frame(path)) for path in paths]
        return arrays_of_frames(frames, texts=texts, **settings)

    key = {"loader": "table", **settings, "files": signature(paths)}
    if texts is not None:
        key |= texts.key
        mean, std = (0.0,), (1.0,)  # tokens are not normalised
    return assemble(name, key, read, mean, std, target_mean=target_mean, target_std=target_std)


def read_frame(path: Path) -> pandas.DataFrame:
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path}: a table must be a file that ends in {' or '.join(SUFFIXES)}")
    import pandas

    try:
        if path.suffix == ".parquet":
            from pyarrow.parquet import read_metadata

            about = read_metadata(path)  # runs of equal values take no room in the file
            check_memory(4 * about.num_rows * about.num_columns)  # as float32
            return pandas.read_parquet(path)
        return _read_csv(path)
    # KeyError and TypeError come from damaged metadata
    except (OSError, ValueError, KeyError, TypeError, pandas.errors.ParserWarning) as error:
        raise DataError(
            f"{path} is damaged, or not a {path.suffix[1:]} file with a header:"
            f" {str(error).strip()}"
        ) from error


def _read_csv(path: Path) -> pandas.DataFrame:
    import pandas

    with warnings.catch_warnings():
        # pandas only warns about rows with more fields than the header
        warnings.simplefilter("error", pandas.errors.ParserWarning)
        header = pandas.read_csv(path, header=None, nrows=1, dtype=str, index_col=False).iloc[0]
        # pandas would rename the second column to "<name>.1": the label would become a feature
        other = next((mark for mark in ";\t|" if len(header) == 1 and mark in str(header[0])), None)
        if other:
            raise ValueError(f"its columns are separated by {other!r}; commas are expected")
        if header.duplicated().any():
            column = header[header.duplicated()].iloc[0]
            raise ValueError(f"it names the column {column!r} twice")
        # low_memory=False: a column has one type, whatever its chunks look like
        return pandas.read_csv(path, low_memory=False, index_col=False)


def arrays_of_frames(
    frames: Sequence[tuple[str, pandas.DataFrame]],
    *,
    features: Sequence[str] | None,
    texts: Texts | None,
    label: str | Sequence[str],
    target: str | None,
    owner: str | None,
    classes: Classes,
    test_fraction: float,
) -> Arrays:
    """The dataset's arrays of one or two data frames.

    Args:
        frames: pairs (source for messages, data frame): the training data and, optionally, the test
            data. For the other arguments see `table`.
    """
    others = [*_columns(label), *([] if owner is None else [owner])]
    used = _inputs(features, texts, frames[0][1].columns, others)
    owners = [owner, *(known_owner(frame, owner) for _, frame in frames[1:])]
    for (source, frame), own in zip(frames, owners, strict=True):
        check_columns(source, frame.columns, [*used, *_columns(label), *([own] if own else [])])
    described: Arrays = {}
    if texts is None:
        xs = [numeric_columns(frame, used, source) for source, frame in frames]
    else:
        words = {source: text_values(frame, texts.column, source) for source, frame in frames}
        xs, described = texts.encoded(words)
    train, *tests = (
        raw_samples(x, frame, source, label, own)
        for x, (source, frame), own in zip(xs, frames, owners, strict=True)
    )
    test = tests[0] if tests else None
    described |= {"columns": np.array(used)}
    return dataset_arrays(train, test, classes, test_fraction, target) | described


def _columns(label: str | Sequence[str]) -> list[str]:
    return [label] if isinstance(label, str) else list(label)


def _inputs(
    features: Sequence[str] | None,
    texts: Texts | None,
    columns: Sequence[str],
    others: Sequence[str],
) -> list[str]:
    """The columns that the model sees."""
    if texts is not None:
        if features is not None:
            raise ConfigError(
                f"dataset.text={texts.column} with dataset.features={features}: the inputs are"
                " either a text or columns of numbers"
            )
        return [texts.column]
    if isinstance(features, str):
        raise ConfigError(
            f"dataset.features={features}: must be null, or a list of columns: [{features}]"
        )
    if features is None:
        used = [column for column in columns if column not in others]
    else:
        used = list(features)
    if not used or set(used) & set(others):
        raise ConfigError(
            f"dataset.features={used}: must name at least one column, and none of"
            f" {', '.join(others)}, the label and the owner"
        )
    return used


def check_columns(source: str, present: Iterable[str], required: Iterable[str]) -> None:
    """Check that a table has these columns.

    Raises:
        DataError: one is missing.
    """
    names = [str(column) for column in present]
    for column in required:
        if column not in names:
            raise DataError(f"{source} has no column {column!r}; it has {', '.join(names)}")


def raw_samples(
    x: np.ndarray,
    frame: pandas.DataFrame,
    source: str,
    label: str | Sequence[str],
    owner: str | None,
) -> RawSamples:
    """The samples with these inputs, and the labels and owners of a data frame."""
    columns = _columns(label)
    y = column_values(frame, columns[0], source, lists=True)
    named = f"{source}, column {columns[0]!r}"
    if not isinstance(label, str):
        y = np.stack([column_values(frame, column, source) for column in columns], axis=1)
        named = f"{source}, columns {columns}"
    owners = None if owner is None else column_values(frame, owner, source)
    return RawSamples(x, y, owners, source, named, tuple(columns))


def numeric_columns(frame: pandas.DataFrame, columns: Sequence[str], source: str) -> np.ndarray:
    """(n, F) float32."""
    from pandas import to_numeric

    x = np.empty((len(frame), len(columns)), np.float32)
    for j, column in enumerate(columns):
        try:
            numbers = to_numeric(frame[column], errors="coerce")
            numbers = numbers.to_numpy(np.float64, na_value=np.nan)
        except TypeError as error:  # the cells are lists, for example
            raise DataError(f"{source}, column {column!r}: expected numbers ({error})") from error
        with np.errstate(over="ignore"):  # too large a number becomes inf, which is reported below
            x[:, j] = numbers
        finite = np.isfinite(x[:, j])
        if not finite.all():
            row = int(finite.argmin())
            (value,) = frame[column].iloc[[row]].tolist()
            where = f"{place(source, row)}, column {column!r}"
            if frame[column].isna().iloc[row]:
                raise DataError(
                    f"{where}: the cell is empty, or says that its value is missing; fill it in,"
                    " or leave the row or the column out"
                )
            raise DataError(
                f"{where}: {repr(value)[:60]}; expected finite"
                " numbers; dataset.features chooses the columns, dataset.text one of texts"
                " (--features and --text of `data declare`)"
            )
    return x


def known_owner(frame: pandas.DataFrame, owner: str | None) -> str | None:
    """The column `owner` of a test set, which need not have it; None where a cell is missing."""
    return owner if owner in frame.columns and not frame[owner].isna().any() else None


def column_values(
    frame: pandas.DataFrame, column: str, source: str, *, lists: bool = False
) -> np.ndarray:
    """The values (n,) of a column of labels or owners, in numpy's type.

    Args:
        frame: the table.
        column: the column.
        source: where the table comes from, for messages.
        lists: whether all values may be lists; the array then holds objects.

    Raises:
        DataError: a value is missing, or is a list.
    """
    missing = frame[column].isna().to_numpy()
    if missing.any():
        raise DataError(
            f"{place(source, int(missing.argmax()))}, column {column!r}: the cell is empty;"
            " expected a value"
        )
    values = frame[column].to_numpy()
    if values.dtype == object:
        are_lists = [isinstance(value, list | np.ndarray) for value in values]
        for row, value in enumerate(values):
            if isinstance(value, dict) or (are_lists[row] and not (lists and all(are_lists))):
                raise DataError(
                    f"{place(source, row)}, column {column!r}: {value}; expected a number or text"
                )
    return values


def text_values(frame: pandas.DataFrame, column: str, source: str) -> list[str]:
    """The values of a column of texts.

    Raises:
        DataError: a value is missing, or is not a text.
    """
    values = column_values(frame, column, source).tolist()
    for row, value in enumerate(values):
        if not isinstance(value, str):
            raise DataError(f"{place(source, row)}, column {column!r}: {value!r}; expected a text")
    return values
