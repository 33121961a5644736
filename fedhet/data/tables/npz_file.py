"""Arrays in an npz file: a table, images, or token numbers."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from fedhet.core import check
from fedhet.core.errors import ConfigError, DataError
from fedhet.data.array_cache import Arrays, signature
from fedhet.data.arrays import assemble, dataset_arrays
from fedhet.data.dataset import Dataset, Statistic
from fedhet.data.files import find_file
from fedhet.data.raw_samples import RawSamples
from fedhet.data.target import CHOICES, Classes

# The arrays of a file that describe its others, as `python -m fedhet.data export` writes them.
_STATISTICS = ("mean", "std", "target_mean", "target_std")
_TOKENS = ("vocabulary", "padding")
DESCRIPTIVE = ("target", "classes", "numbers", *_STATISTICS, *_TOKENS)
_HEADERS: dict[tuple[int, int], Any] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
# What np.load raises for a damaged file, or for one that contains objects.
DAMAGE = (
    OSError,
    ValueError,
    EOFError,
    TypeError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)


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
    mean: Statistic,
    std: Statistic,
    target_mean: Statistic,
    target_std: Statistic,
) -> Dataset:
    """The dataset of an npz file.

    Args:
        file: its path, absolute or under `data_dir`.
        x_train, x_test: the names of arrays: a table (n, F); images (n, H, W) or (n, C, H, W) as
            uint8 or floats in [0, 1]; or, with `text`, token numbers (n, T).
        y_train, y_test: the names of arrays: classes (n,), whole numbers or text; numbers (n,) or
            (n, K); or labels (n, L) of zeros and ones.
        owner: the name of an array (n,), the natural owner of each training sample; None: there
            are no owners.
        owner_test: the same of the test samples, which `partition.pool_test=true` uses.
        target: see `fedhet.data.target.encoded`; None also stands for an array `target` in the
            file, and for the next token of a text.
        classes: see `fedhet.data.arrays.dataset_arrays`; None also stands for an array `classes` in
            the file, the names of 0 .. C-1.
        text: whether the inputs are token numbers.
        vocabulary, padding: of a text, see `fedhet.data.dataset.Dataset`; None also stands for
            arrays of these names in the file. Without either, a text has the tokens that occur, or
            those that may be the next one, and no padding.
        mean, std, target_mean, target_std: see `fedhet.data.dataset.Dataset`; "auto" also stands
            for arrays of these names in the file. `mean` and `std` are not used for text.

    Raises:
        DataError: the file is damaged, lacks an array, or an array contains no such data; the
            message names the array and the row.
    """
    check.boolean("dataset.text", text)
    check.optional(check.integer, "dataset.vocabulary", vocabulary, low=1)
    check.optional(check.integer, "dataset.padding", padding, low=0)
    tokens = {"vocabulary": vocabulary, "padding": padding}
    names = {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}
    if owner is not None:
        names["owner"] = owner
    if owner_test is not None:
        if owner is None:
            raise ConfigError(
                f"dataset.owner_test={owner_test}: dataset.owner must name the array of the"
                " training samples' owners"
            )
        names["owner_test"] = owner_test
    path = find_file(data_dir, "file", file)
    key = {
        "loader": "npz",
        "names": names,
        "target": target,
        "classes": classes,
        "text": text,
        **tokens,
        "files": signature([path]),
    }
    read = partial(_read, path, names, target, classes, text, tokens)
    if text:
        mean, std = (0.0,), (1.0,)
    return assemble(name, key, read, mean, std, target_mean=target_mean, target_std=target_std)


def _read(
    path: Path,
    names: Mapping[str, str],
    target: str | None,
    classes: Classes,
    text: bool,
    tokens: Mapping[str, int | None],
) -> Arrays:
    """The dataset's arrays; see `npz`."""
    arrays = load_arrays(path, names)
    sources = {key: f"{path}, array {array!r}" for key, array in names.items()}
    to_inputs = token_numbers if text else numeric_inputs
    train = RawSamples(
        to_inputs(arrays["x_train"], sources["x_train"]),
        arrays["y_train"],
        arrays.get("owner"),
        sources["x_train"],
        sources["y_train"],
    )
    test = RawSamples(
        to_inputs(arrays["x_test"], sources["x_test"]),
        arrays["y_test"],
        arrays.get("owner_test"),
        sources["x_test"],
        sources["y_test"],
    )
    descriptive = {key: arrays[key] for key in DESCRIPTIVE if key in arrays}
    if classes is not None:
        descriptive.pop("classes", None)
    for key, values in descriptive.items():
        check_descriptive(key, values, path)
    if target == "number":
        descriptive.pop("classes", None)
    if "classes" in descriptive:
        classes = len(descriptive["classes"])
    stated = descriptive.pop("target", None)
    if target is None:
        target = str(stated) if stated is not None else "next_char" if text else None
    described = dataset_arrays(train, test, classes, target=target) | descriptive
    return described | _tokens(described, tokens) if text else described


def _tokens(arrays: Arrays, given: Mapping[str, int | None]) -> Arrays:
    """The arrays vocabulary and padding of a text, as far as it has them."""
    tokens = {key: arrays[key] for key in _TOKENS if key in arrays}
    tokens |= {key: np.array(value) for key, value in given.items() if value is not None}
    if "vocabulary" not in tokens and arrays["target"][0] != "next_char":
        largest = max(int(arrays[part].max()) for part in ("x", "test_x"))
        tokens["vocabulary"] = np.array(max(largest, int(tokens.get("padding", 0))) + 1)
    return tokens


def load_arrays(
    path: Path, names: Mapping[str, str], optional: Mapping[str, str] | None = None
) -> Arrays:
    """The arrays by the keys of `names`, and the file's descriptive arrays.

    Args:
        path: the file.
        names: key -> the name of an array that the file must have.
        optional: the same of arrays that it may have.
    """
    try:
        with np.load(path) as file:
            present = {k: array for k, array in (optional or {}).items() if array in file.files}
            for key, array in names.items():
                if array not in file.files:
                    raise DataError(
                        f"{path} has no array {array!r} (dataset.{key}); it has"
                        f" {', '.join(file.files)}"
                    )
            descriptive = [key for key in DESCRIPTIVE if key in file.files]
            wanted = {**names, **present}
            check_arrays(file, {*wanted.values(), *descriptive})
            arrays = {key: file[array] for key, array in wanted.items()}
            return {key: file[key] for key in descriptive} | arrays
    except DataError:
        raise
    except DAMAGE as error:
        raise DataError(
            f"{path} is damaged, or not an npz file of numbers and text: {error}"
        ) from error


def check_arrays(file: np.lib.npyio.NpzFile, names: Iterable[str]) -> None:
    """Refuse arrays that claim more memory than there is: a small file can stand for any size.

    Raises:
        ValueError: it says how much they claim.
    """
    claimed, archive = 0, file.zip
    assert archive is not None
    for name in names:
        with archive.open(name if name in archive.NameToInfo else f"{name}.npy") as member:
            version = np.lib.format.read_magic(member)
            if version not in _HEADERS:
                raise ValueError(f"array {name!r} is of numpy's format {version}")
            shape, _, dtype = _HEADERS[version](member)
            claimed += math.prod(shape) * dtype.itemsize
    check_memory(claimed)


def check_memory(claimed: int) -> None:
    """Refuse data that need more bytes than this machine has memory.

    Raises:
        ValueError: it says how many.
    """
    if claimed > (most := psutil.virtual_memory().total):
        raise ValueError(f"its content takes {claimed} bytes; this machine has {most} of memory")


def check_descriptive(key: str, values: np.ndarray, path: Path) -> None:
    """Check one of the arrays that describe the others.

    Raises:
        DataError: it is not what its name says.
    """
    if key in ("classes", "numbers"):
        valid = values.ndim == 1 and len(np.unique(values)) == len(values)
        expected = "distinct names (C,)"
    elif key == "target":
        valid = values.ndim == 0 and str(values) in CHOICES
        expected = f"one of {', '.join(CHOICES)}"
    elif key in _TOKENS:
        valid = values.ndim == 0 and values.dtype.kind in "iu" and bool(values >= 0)
        expected = "a whole number >= 0"
    else:
        numbers = values.ndim == 1 and values.dtype.kind in "iuf"
        valid = numbers and bool(np.isfinite(values).all())
        expected = "a finite number for each channel or column"
        if key.endswith("std"):
            valid = valid and values.min() > 0
            expected += ", > 0"
    if not valid:
        raise DataError(f"{path}, array {key!r} is {values.tolist()}; expected {expected}")


def numeric_inputs(x: np.ndarray, source: str) -> np.ndarray:
    """A table (n, F) as float32, or images (n, C, H, W) as uint8 or float32."""
    if x.ndim not in (2, 3, 4) or 0 in x.shape[1:] or x.dtype.kind not in "biuf":
        raise DataError(
            f"{source} is {x.dtype} {x.shape}; expected numbers (n, F), (n, H, W) or (n, C, H, W)"
        )
    if x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
        raise DataError(
            f"{source} is {x.shape}; channels must come first, transpose(0, 3, 1, 2) moves them"
        )
    if x.ndim > 2 and x.dtype.kind != "f" and x.dtype != np.uint8:
        raise DataError(f"{source} holds images as {x.dtype}; expected uint8, or floats in [0, 1]")
    if x.ndim == 3:
        x = x[:, None]
    if x.ndim == 4 and x.dtype == np.uint8:
        return x
    with np.errstate(over="ignore"):  # too large a number becomes inf, which is reported below
        numbers = x.astype(np.float32)
    if x.ndim == 2:
        valid = np.isfinite(numbers)
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


def token_numbers(x: np.ndarray, source: str) -> np.ndarray:
    """Texts (n, T) as int64 token numbers."""
    if x.ndim != 2 or not x.shape[1] or x.dtype.kind not in "iu":
        raise DataError(
            f"{source} is {x.dtype} {x.shape}; dataset.text=true expects token numbers (n, T)"
        )
    return x.astype(np.int64)
