"""How image files of each format become arrays: uint8 (n, C, H, W) pixels and int64 (n,) labels."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from fedhet.data.array_cache import Arrays
from fedhet.errors import DataError

_MODES = {
    "L": "L",
    "1": "L",
    "LA": "L",
    "RGB": "RGB",
    "RGBA": "RGB",
    "P": "RGB",
    "CMYK": "RGB",
}  # PIL's mode -> the mode that is kept


def read_images(
    images: Sequence[tuple[str, Path | BytesIO]], size: int | None = None, mode: str | None = None
) -> np.ndarray:
    """Decodes images into uint8 (n, C, H, W): C is 1 for grey images and 3 for coloured ones.

    Args:
        images: (what to call it in messages, the file) of each.
        size: resizes each to (size, size); None: as they are.
        mode: "L" makes all grey, "RGB" coloured; None: as they are.

    Raises: DataError: a file is damaged, of an unknown kind, or differs in shape from the first; it
        names the file.
    """
    from PIL import Image, UnidentifiedImageError

    array = np.empty(0, np.uint8)
    for i, (name, file) in enumerate(images):
        try:
            with Image.open(file) as image:
                if image.mode not in _MODES:
                    raise DataError(
                        f"{name} is of PIL's mode {image.mode!r}; allowed are 8-bit grey and"
                        f" colour: {', '.join(_MODES)}"
                    )
                kept = image.convert(mode or _MODES[image.mode])
        except UnidentifiedImageError as error:
            raise DataError(
                f"{name} is not a readable image: it is damaged, or of an unknown format"
            ) from error
        # PIL raises SyntaxError for a broken PNG chunk
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:
            raise DataError(f"{name} is not a readable image: {error}") from error
        if size is not None and kept.size != (size, size):
            kept = kept.resize((size, size), Image.Resampling.BILINEAR)
        pixels = np.atleast_3d(np.asarray(kept)).transpose(2, 0, 1)
        if i == 0:
            array = np.empty((len(images), *pixels.shape), np.uint8)
        if pixels.shape != array.shape[1:]:
            raise DataError(
                f"{name} is (C, H, W) = {pixels.shape}, but {images[0][0]} is {array.shape[1:]};"
                " all must be alike (for dataset=image_folder, dataset.size and dataset.colours"
                " make them so)"
            )
        array[i] = pixels
    return array


def read_labels(path: Path, labels: np.ndarray, classes: int, first: int = 0) -> np.ndarray:
    """`labels` as int64 in 0 .. classes - 1, where the file counts from `first`; DataError names
    the file and the first wrong row."""
    if labels.dtype.kind not in "iu":
        raise DataError(f"{path}: its labels are {labels.dtype}; whole numbers are expected")
    wrong = np.flatnonzero((labels < first) | (labels >= first + classes))
    if len(wrong):
        last = first + classes - 1
        raise DataError(
            f"{path}: row {wrong[0]} has label {labels[wrong[0]]}; labels go from {first} to {last}"
        )
    return labels.astype(np.int64) - first


def map_idx(path: Path, ndim: int) -> np.ndarray:
    """The uint8 array of `ndim` dimensions in an idx file (http://yann.lecun.com/exdb/mnist),
    mapped: nothing is read yet.

    Raises:
        DataError: the file cannot be read, or is not as its header announces.
    """
    start = 4 * (1 + ndim)
    try:
        with path.open("rb") as file:
            header = file.read(start)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    shape = tuple(np.frombuffer(header[4:], ">u4").tolist()) if len(header) == start else ()
    size, expected = path.stat().st_size, start + math.prod(shape)
    if header[:4] != bytes([0, 0, 8, ndim]) or size != expected:
        raise DataError(
            f"{path} is damaged or cut short: expected an idx file of bytes with {ndim} dimensions,"
            f" in the size that its header announces; it has {size} bytes and begins with"
            f" {header!r}"
        )
    if not all(shape):
        raise DataError(f"{path} holds no sample: its shape is {shape}")
    return np.memmap(path, np.uint8, "c", start, shape)


def read_batches(place: Path, kind: Any) -> Arrays:
    """CIFAR's batches at `place`, by torchvision's class `kind`; they are pickles, so only the
    published bytes are opened."""
    from torchvision.datasets.utils import check_integrity

    class Batches(kind):  # type: ignore[misc]
        base_folder = place.name

    for file, md5 in [
        *Batches.train_list,
        *Batches.test_list,
        (Batches.meta["filename"], Batches.meta["md5"]),
    ]:
        if not check_integrity(str(place / file), md5):
            raise DataError(f"{place / file} is damaged: its md5 must be {md5}")
    train, test = (Batches(place.parent, train=part) for part in (True, False))
    x, test_x = (np.ascontiguousarray(part.data.transpose(0, 3, 1, 2)) for part in (train, test))
    return {
        "x": x,
        "y": np.array(train.targets),
        "test_x": test_x,
        "test_y": np.array(test.targets),
        "classes": np.array(train.classes),
    }


def read_parquet(path: Path, image: str, label: str, classes: int) -> Arrays:
    """x, y and the classes' names from a table as Hugging Face writes them: a column of encoded
    images and one of labels."""
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
        raise DataError(f"{path} holds no row")
    x = read_images([(f"{path}, row {i}", BytesIO(cell or b"")) for i, cell in enumerate(cells)])
    y = read_labels(path, table[label].to_numpy(), classes)
    about = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}"))
    names = about.get("info", {}).get("features", {}).get(label, {}).get("names") or [
        str(c) for c in range(classes)
    ]
    return {"x": x, "y": y, "classes": np.array(names)}
