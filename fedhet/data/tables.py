"""The user's own data: arrays in an npz file, or tables in csv or parquet files. Messages count
rows from 0, without the header."""

from __future__ import annotations

import warnings
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedhet import check
from fedhet.data.array_cache import Arrays, signature, stored
from fedhet.data.arrays import Classes, Part, Standard, assemble, gather
from fedhet.data.dataset import Dataset
from fedhet.data.files import find
from fedhet.errors import ConfigError, DataError

if TYPE_CHECKING:
    import pandas

SUFFIXES = (".csv", ".parquet")
ABOUT = (
    "classes",
    "mean",
    "std",
)  # arrays of an npz file that say what its others are; `python -m fedhet.data export` writes them


def _path(data_dir: str, key: str, file: object) -> Path:
    """The file that `dataset.<key>` names, absolute or under `data_dir`."""
    path = Path(check.text(f"dataset.{key}", file))
    return (
        find(
            data_dir,
            [(str(path.parent), [escape(path.name)])],
            f"Put your data there, name the file in dataset.{key}",
        )
        / path.name
    )


# ---- npz


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
    classes: Classes,
    text: bool,
    mean: Standard,
    std: Standard,
) -> Dataset:
    """Arrays of one npz file.

    Args: file: its path, absolute or under `data_dir`. x_train, x_test: names of arrays: a table
        (n, F); images (n, H, W) or (n, C, H, W), uint8 or floats in [0, 1]; or, with `text`, token
        numbers (n, T), each one of the classes. y_train, y_test: names of arrays (n,), whole
        numbers or text. owner: the name of an array (n,), each training sample's natural owner;
        None: there is none. classes: see `fedhet.data.arrays.gather`; None also stands for an array
        `classes` in the file, the names of 0 .. C-1. mean, std: see `fedhet.data.arrays.assemble`;
        "auto" also stands for arrays `mean` and `std` in the file. Not for texts.

    Raises: DataError: the file is damaged, lacks an array, or an array holds no such data; it names
        the array and the row.
    """
    check.boolean("dataset.text", text)
    names = {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test} | (
        {} if owner is None else {"owner": owner}
    )
    path = _path(data_dir, "file", file)

    def make() -> Arrays:
        arrays = _arrays(path, names)
        where = {key: f"{path}, array {array!r}" for key, array in names.items()}
        x = {
            key: (_tokens if text else _samples)(arrays[key], where[key])
            for key in ("x_train", "x_test")
        }
        train = Part(
            x["x_train"],
            arrays["y_train"],
            arrays.get("owner"),
            (where["x_train"], where["y_train"]),
        )
        test = Part(x["x_test"], arrays["y_test"], None, (where["x_test"], where["y_test"]))
        about = {
            key: _about(arrays[key], key, path)
            for key in ABOUT
            if key in arrays and (key != "classes" or classes is None)
        }
        return gather(train, test, len(about["classes"]) if "classes" in about else classes) | about

    key = {
        "loader": "npz",
        "names": names,
        "classes": classes,
        "text": text,
        "files": signature([path]),
    }
    arrays = stored(name, key, make)
    return assemble(name, arrays) if text else assemble(name, arrays, mean, std)


def _arrays(path: Path, names: Mapping[str, str]) -> Arrays:
    try:
        with np.load(path) as file:
            if missing := [
                f"{array!r} (dataset.{key})"
                for key, array in names.items()
                if array not in file.files
            ]:
                raise DataError(f"{path} has no array {missing[0]}; it has {', '.join(file.files)}")
            return {key: file[key] for key in ABOUT if key in file.files} | {
                key: file[array] for key, array in names.items()
            }
    except DataError:
        raise
    except (
        OSError,
        ValueError,
        EOFError,
        TypeError,
        RuntimeError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:  # damaged, or objects in it
        raise DataError(
            f"{path} is damaged, or no npz file of numbers and text: {error}"
        ) from error


def _about(values: np.ndarray, key: str, path: Path) -> np.ndarray:
    """The array `key` of ABOUT."""
    if key == "classes":
        right, expected = (
            values.ndim == 1 and len(np.unique(values)) == len(values),
            "different names (C,)",
        )
    else:
        right = (
            values.ndim == 1
            and values.dtype.kind in "iuf"
            and bool(np.isfinite(values).all())
            and (key == "mean" or values.min() > 0)
        )
        expected = "a finite number for each channel or column" + (", > 0" if key == "std" else "")
    if not right:
        raise DataError(f"{path}, array {key!r} is {values.tolist()}; expected {expected}")
    return values


def _samples(x: np.ndarray, where: str) -> np.ndarray:
    """A table (n, F) as float32, or images (n, C, H, W) as uint8 or float32."""
    if x.ndim not in (2, 3, 4) or 0 in x.shape[1:] or x.dtype.kind not in "biuf":
        raise DataError(
            f"{where} is {x.dtype} {x.shape}; expected numbers (n, F), (n, H, W) or (n, C, H, W)"
        )
    if x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
        raise DataError(
            f"{where} is {x.shape}; channels come first, transpose(0, 3, 1, 2) puts them there"
        )
    if x.ndim > 2 and x.dtype.kind != "f" and x.dtype != np.uint8:
        raise DataError(f"{where} holds images as {x.dtype}; expected uint8, or floats in [0, 1]")
    images = x[:, None] if x.ndim == 3 else x
    if images.ndim == 4 and images.dtype == np.uint8:
        return images
    with np.errstate(over="ignore"):  # becomes infinite, which is told
        found = images.astype(np.float32)
    table = found.ndim == 2
    if not (right := np.isfinite(found) if table else (found >= 0) & (found <= 1)).all():
        at, expected = (
            np.argwhere(~right)[0],
            ("finite numbers" if table else "pixels in [0, 1], or uint8"),
        )
        raise DataError(
            f"{where}, row {at[0]}: {images[tuple(at)]} at {at[1:].tolist()}; expected {expected}"
        )
    return found


def _tokens(x: np.ndarray, where: str) -> np.ndarray:
    if x.ndim != 2 or not x.shape[1] or x.dtype.kind not in "iu":
        raise DataError(
            f"{where} is {x.dtype} {x.shape}; dataset.text=true expects token numbers (n, T)"
        )
    return x.astype(np.int64)


# ---- csv and parquet


def table(
    *,
    name: str,
    data_dir: str,
    train: str,
    test: str | None,
    test_fraction: float,
    features: Sequence[str] | None,
    label: str,
    owner: str | None,
    classes: Classes,
    mean: Standard,
    std: Standard,
) -> Dataset:
    """Rows of csv files (with a header) or parquet files.

    Args: train, test: the files' paths, absolute or under `data_dir`. Without `test`,
        `test_fraction` of the rows of `train` are the global test set, the same whatever the seed
        of the run. features: the columns (F,) that the model sees, all of numbers; None: all but
        `label` and `owner`. label: the column of classes, whole numbers or text. owner: the column
        of natural owners; None: there is none. classes: see `fedhet.data.arrays.gather`. mean, std:
        see `fedhet.data.arrays.assemble`.

    Raises: DataError: a file is damaged, lacks a column, or has a cell that is missing or no finite
        number; it names file, row and column.
    """
    check.number("dataset.test_fraction", test_fraction, open_low=0, open_high=1)
    paths = [
        _path(data_dir, key, file)
        for key, file in (("train", train), ("test", test))
        if key == "train" or file is not None
    ]
    columns: dict[str, Any] = {"features": features, "label": label, "owner": owner}

    def make() -> Arrays:
        return columns_of(
            [(str(path), _frame(path)) for path in paths],
            classes=classes,
            test_fraction=test_fraction,
            **columns,
        )

    key = {
        "loader": "table",
        **columns,
        "classes": classes,
        "test_fraction": test_fraction,
        "files": signature(paths),
    }
    return assemble(name, stored(name, key, make), mean, std)


def _frame(path: Path) -> pandas.DataFrame:
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path}: a table is a file that ends in {' or '.join(SUFFIXES)}")
    import pandas

    try:
        if path.suffix == ".parquet":
            return pandas.read_parquet(path)
        with warnings.catch_warnings():
            warnings.simplefilter(
                "error", pandas.errors.ParserWarning
            )  # rows with more fields than the header
            header = pandas.read_csv(path, header=None, nrows=1, dtype=str, index_col=False).iloc[0]
            # pandas would call the second one "<name>.1": another label among the features
            if header.duplicated().any():
                raise ValueError(
                    f"it names the column {header[header.duplicated()].iloc[0]!r} twice"
                )
            # a column has one type, whatever its parts look like
            return pandas.read_csv(path, low_memory=False, index_col=False)
    # the third and fourth by damaged metadata
    except (OSError, ValueError, KeyError, TypeError, pandas.errors.ParserWarning) as error:
        raise DataError(
            f"{path} is damaged, or no {path.suffix[1:]} file with a header: {str(error).strip()}"
        ) from error


def columns_of(
    frames: Sequence[tuple[str, pandas.DataFrame]],
    *,
    features: Sequence[str] | None,
    label: str,
    owner: str | None,
    classes: Classes,
    test_fraction: float,
) -> Arrays:
    """The arrays of (where it is from, table): one to train and, unless `test_fraction` cuts it
    off, one to test. See `table`."""
    if isinstance(features, str):
        raise ConfigError(
            f"dataset.features={features}: must be null, or a list of columns: [{features}]"
        )
    others = [label] if owner is None else [label, owner]
    used = (
        [column for column in frames[0][1].columns if column not in others]
        if features is None
        else list(features)
    )
    if not used or set(used) & set(others):
        raise ConfigError(
            f"dataset.features={used}: must name a column, and none of {', '.join(others)}, the"
            " label and the owner"
        )
    parts = []
    for i, (where, frame) in enumerate(frames):
        owners = owner if i == 0 else None  # nobody owns the global test set
        for column in [*used, label] if owners is None else [*used, label, owners]:
            if column not in frame.columns:
                raise DataError(
                    f"{where} has no column {column!r}; it has {', '.join(map(str, frame.columns))}"
                )
        parts.append(
            Part(
                _numbers(frame, used, where),
                values_of(frame, label, where),
                None if owners is None else values_of(frame, owners, where),
                (where, f"{where}, column {label!r}"),
            )
        )
    return gather(parts[0], parts[1] if len(parts) > 1 else None, classes, test_fraction)


def _numbers(frame: pandas.DataFrame, columns: Sequence[str], where: str) -> np.ndarray:
    """(n, F) float32."""
    from pandas import to_numeric

    x = np.empty((len(frame), len(columns)), np.float32)
    for j, column in enumerate(columns):
        try:
            numbers = to_numeric(frame[column], errors="coerce").to_numpy(
                np.float64, na_value=np.nan
            )
        except TypeError as error:  # of lists and the like
            raise DataError(f"{where}, column {column!r}: expected numbers ({error})") from error
        with np.errstate(over="ignore"):  # becomes infinite, which is told
            x[:, j] = numbers
        if not (finite := np.isfinite(x[:, j])).all():
            row = int(finite.argmin())
            (value,) = frame[column].iloc[[row]].tolist()
            shown = repr(value)[:60]
            raise DataError(
                f"{where}, row {row}, column {column!r}: {shown}; expected finite numbers;"
                " dataset.features chooses columns"
            )
    return x


def values_of(frame: pandas.DataFrame, column: str, where: str) -> np.ndarray:
    """(n,) as numpy has them; none is missing."""
    if (missing := frame[column].isna().to_numpy()).any():
        raise DataError(
            f"{where}, row {int(missing.argmax())}, column {column!r}: nothing is there; expected a"
            " value"
        )
    values = frame[column].to_numpy()
    if (
        values.dtype == object
        and (lists := [isinstance(value, (list, dict, np.ndarray)) for value in values])
        and any(lists)
    ):
        raise DataError(
            f"{where}, row {lists.index(True)}, column {column!r}: {values[lists.index(True)]};"
            " expected a number or text"
        )
    return values
