"""Apply a model of a run to images, tables, arrays or texts."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedhet.core.errors import ConfigError, DataError, clean
from fedhet.core.objects import are_pixels
from fedhet.data.arrays import first_row
from fedhet.data.dataset import MEDIAN, REFUSE
from fedhet.data.encoding import Cells
from fedhet.data.files import roots
from fedhet.data.frames import SUFFIXES as TABLES
from fedhet.data.frames import CsvFormat, read_frame
from fedhet.data.images import COLOURS, is_image, log_unread, read_images, visible_files
from fedhet.data.images import SUFFIXES as IMAGES
from fedhet.data.local.reading import declared_texts
from fedhet.data.storage import as_csv, as_json, write_text
from fedhet.data.tables import (
    check_arrays,
    check_columns,
    numeric_inputs,
    opened_npz,
    text_values,
    token_numbers,
)
from fedhet.data.tokens import Texts
from fedhet.handover.served import Described, Served, add_arguments, opened

if TYPE_CHECKING:
    import pandas

# The datasets whose loaders convert every image to grey or colour, without a setting.
_CONVERTED = {
    "chest_xray": "L",
    "cifar10": "RGB",
    "cifar100": "RGB",
    "cinic10": "RGB",
    "tiny_imagenet": "RGB",
}


def read_inputs(
    about: Described, files: Sequence[Path], array: str | None, tokenizer: str | None
) -> tuple[list[str], Tensor]:
    """Read the samples of the files.

    Args:
        about: the run, which says what its inputs are.
        files: images, or folders of them; csv or Parquet tables; npz arrays.
        array: the array in the npz files; None: the only one, or else the run's test inputs.
        tokenizer: a tokenizer.json or its folder, for texts; None: the one that the run names.

    Returns:
        The name of each sample, which is its file, with the row where the file has several, as
        errors count; and (n, ...), the samples, not normalised.

    Raises:
        ConfigError: the run's model reads no such files.
        DataError: a file is missing, damaged, or does not fit the run.
    """
    names: list[str] = []
    parts: list[np.ndarray] = []
    for file in _listed(files):
        suffix = file.suffix.lower()
        if suffix == ".npz":
            x = _array(about, file, array)
        elif is_image(file) and about.images:
            x = _image(about, file)
        elif suffix in TABLES and not about.images:
            x = _rows(about, file, tokenizer)
        else:
            kind = "images" if about.images else "texts" if about.text else "rows of numbers"
            raise ConfigError(
                f"{file}: an input of this run has the shape {about.shape}, as {kind} have, and is"
                f" read from {', '.join(['.npz', *(IMAGES if about.images else TABLES)])}"
            )
        rows = range(first_row(str(file)), first_row(str(file)) + len(x))
        names += [str(file)] if is_image(file) else [f"{file}:{row}" for row in rows]
        parts.append(x)
    kinds = {x.dtype for x in parts}
    if len(kinds) > 1:  # images as bytes and as numbers
        parts = [x / np.float32(255) if are_pixels(x) else x for x in parts]
    return names, torch.from_numpy(np.concatenate(parts))


def _listed(files: Sequence[Path]) -> list[Path]:
    """The files, with the images of a folder in its place."""
    listed: list[Path] = []
    for file in files:
        if file.is_dir():
            images = sorted(path for path in visible_files(file) if is_image(path))
            if not images:
                raise DataError(f"{file} contains no images ({', '.join(IMAGES)})")
            log_unread(file, images, logging.WARNING)
            listed += images
        elif file.is_file():
            listed.append(file)
        else:
            raise DataError(f"{file} does not exist")
    return listed


# ---- images
def _image(about: Described, file: Path) -> np.ndarray:
    """(1, C, H, W) uint8, resized and converted as the run's settings declare."""
    dataset = about.config.dataset
    loader = str(dataset.get("_target_", "")).rpartition(".")[2]
    mode = COLOURS.get(dataset.get("colours")) or _CONVERTED.get(loader)
    x = read_images([(str(file), file)], dataset.get("size"), mode)
    if x.shape[1:] != about.shape:
        raise DataError(
            f"{file} has (C, H, W) = {x.shape[1:]}, the run's images {about.shape}; its settings"
            " declare no conversion (dataset.size, dataset.colours), so convert the file"
        )
    return x


# ---- tables and texts
def _rows(about: Described, file: Path, tokenizer: str | None) -> np.ndarray:
    columns = about.partition.get("columns", [])
    if not columns:
        raise ConfigError(
            f"{file}: the columns of this run have no names, because its data were arrays; give an"
            " npz file"
        )
    dataset = about.config.dataset
    cells = Cells(dataset.get("categories"), MEDIAN if about.median else REFUSE)
    columns = cells.columns(columns)
    names = dict.fromkeys(columns, ()) if about.text else cells.names
    frame = read_frame(file, names, CsvFormat.of(dataset.get("read")))
    if not len(frame):
        raise DataError(f"{file} contains no rows")
    _check_columns(about, file, frame, columns)
    if about.text:
        how = replace(_texts(about, file, tokenizer), max_length=about.shape[0], filled=True)
        (x,), made = how.encoded({str(file): text_values(frame, columns[0], str(file))})
        for key in ("vocabulary", "padding"):
            if int(made[key]) != about.partition[key]:
                raise DataError(
                    f"{how.file} is not the tokenizer of this run: its {key} is {int(made[key])},"
                    f" that of the run {about.partition[key]}"
                )
        return x
    return cells.read(frame, columns, str(file))


def _check_columns(
    about: Described, file: Path, frame: pandas.DataFrame, columns: Sequence[str]
) -> None:
    """Refuse a table that lacks a column, or has one that the run did not have.

    What the run has learned, and the owners, may be there. A run that chose its columns, or a text,
    had others as well.
    """
    check_columns(str(file), frame.columns, columns)
    dataset = about.config.dataset
    if dataset.get("features") is not None or about.text:
        return
    label = dataset.get("label")
    known = {*columns, *([label] if isinstance(label, str) else label or []), dataset.get("owner")}
    if extra := [column for column in frame.columns if column not in known]:
        raise DataError(
            f"{file} has the columns {', '.join(extra)}, which this run did not have; its inputs"
            f" are {', '.join(columns)}"
        )


def _texts(about: Described, file: Path, tokenizer: str | None) -> Texts:
    """The texts of a file, by the tokenizer of the run; with dataset=local it is at the site."""
    dataset = about.config.dataset
    named = Path(tokenizer).absolute() if tokenizer else None
    if "sites" in dataset:
        return declared_texts(
            dataset.text, dataset.tokenizer, about.shape[0], named, file.parent, "--tokenizer"
        )
    data = str(dataset.get("train") if "path" not in dataset else dataset.path)
    places = [root / data for root in roots(about.config.data_dir)]
    beside = next((place for place in places if place.exists()), places[0])
    how = Texts.of(
        dataset.text,
        str(named) if named else dataset.tokenizer,
        dataset.max_length,
        about.config.data_dir,
        beside if beside.is_dir() else beside.parent,
    )
    assert how is not None
    return how


# ---- arrays
def _array(about: Described, file: Path, array: str | None) -> np.ndarray:
    with opened_npz(file) as arrays:
        only = arrays.files[0] if len(arrays.files) == 1 else None
        name = array or only or about.config.dataset.get("x_test", "x_test")
        if name not in arrays.files:
            raise ConfigError(
                f"{file} has no array {name!r}; choose by --array: {', '.join(arrays.files)}"
            )
        check_arrays(arrays, [name])
        x = arrays[name]
    if about.text:
        x = token_numbers(x, str(file))
    else:
        x = numeric_inputs(x, str(file), missing=about.median)
    if x.shape[1:] != about.shape:
        raise DataError(
            f"{file}: its samples have the shape {x.shape[1:]}, the run's {about.shape}"
        )
    if not len(x):
        raise DataError(f"{file} contains no samples")
    last = about.partition["vocabulary"] - 1
    if about.text and not 0 <= x.min() <= x.max() <= last:
        raise DataError(f"{file}: tokens are {x.min()} to {x.max()}; those of the run 0 to {last}")
    return x


# ---- predictions
_BATCH = 256


def main(argv: Sequence[str]) -> int:
    """Print or write a prediction for each sample.

    Args:
        argv: the arguments after `predict`.
    """
    parser = argparse.ArgumentParser(prog="python -m fedhet predict", description=__doc__)
    add_arguments(parser)
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help=f"images ({', '.join(IMAGES)}), folders of them, csv or Parquet tables, npz arrays",
    )
    parser.add_argument("--format", choices=_FORMATTED, default="table", help="default: table")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write to a file, not to stdout")
    parser.add_argument(
        "--array", metavar="NAME", help="the array in npz files; default: the only one, or x_test"
    )
    parser.add_argument(
        "--tokenizer", metavar="FILE", help="for texts; default: the one that the run names"
    )
    args = parser.parse_args(argv)
    about, served = opened(args.run, args.view, args.client, args.inputs_of)
    names, x = read_inputs(about, args.files, args.array, args.tokenizer)
    outputs, chosen = predict(served, x)
    if not outputs.isfinite().all():
        row = int((~outputs.isfinite().all(1)).nonzero()[0])
        raise DataError(f"{names[row]}: the model returns no finite numbers for it")
    text = _FORMATTED[args.format](about, names, outputs, chosen)
    if args.out is None:
        print(text, end="")
    else:
        write_text(args.out, text)
        print(f"written: {args.out}")
    return 0


def predict(served: Served, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the readable outputs for raw inputs, and what is predicted.

    Args:
        served: the model.
        x: (n, ...), its inputs.

    Returns:
        (n, K) probabilities or numbers; and (n, K) booleans: the outputs that are predicted, one
        class, or any number of labels. All numbers are.
    """
    with torch.inference_mode():
        # Classes are chosen as an evaluation chooses them, among outputs before the softmax, of
        # which two may be different and the probabilities equal.
        raw = torch.cat([served.raw(part) for part in x.split(_BATCH)])
        outputs = served.readable(raw)
        if served.target == "number":
            return outputs, torch.ones_like(outputs, dtype=torch.bool)
        if served.target == "labels":
            return outputs, raw > 0
        return outputs, torch.zeros_like(raw, dtype=torch.bool).scatter_(
            1, raw.argmax(1, keepdim=True), True
        )


def _predictions(about: Described, chosen: Tensor) -> list[str]:
    names = about.outputs
    return ["; ".join(names[i] for i in row.nonzero()[:, 0].tolist()) for row in chosen]


def _frame(about: Described, names: list[str], outputs: Tensor, chosen: Tensor) -> pandas.DataFrame:
    """A row for each sample: its name, the prediction, and all outputs."""
    import pandas

    values = pandas.DataFrame(outputs.numpy())
    if about.target == "number":
        values.columns = pandas.Index(about.outputs)
    else:
        values.columns = pandas.Index([f"p({name})" for name in about.outputs])
        values.insert(0, "prediction", _predictions(about, chosen), allow_duplicates=True)
    values.insert(0, "input", names, allow_duplicates=True)
    return values


def _json(about: Described, names: list[str], outputs: Tensor, chosen: Tensor) -> str:
    samples: list[dict[str, Any]] = []
    for name, row, which in zip(names, outputs.tolist(), chosen, strict=True):
        sample: dict[str, Any] = {"input": name}
        if about.target == "labels":
            sample["prediction"] = [about.outputs[i] for i in which.nonzero()[:, 0].tolist()]
        elif about.target != "number":
            sample["prediction"] = about.outputs[int(which.nonzero())]
        samples.append(sample | {about.output: dict(zip(about.outputs, row, strict=True))})
    return as_json(samples, indent=1)


def _table(about: Described, names: list[str], outputs: Tensor, chosen: Tensor) -> str:
    """The table for a terminal; of classes it has the predicted one only."""
    import pandas

    if about.target in ("number", "labels"):
        frame = _frame(about, names, outputs, chosen)
    else:
        probability = outputs[chosen]
        columns = {"prediction": _predictions(about, chosen), "probability": probability}
        frame = pandas.DataFrame({"input": names, **columns})
    for column in frame.select_dtypes("str"):
        frame[column] = [clean(value) for value in frame[column]]
    frame.columns = pandas.Index([clean(str(column)) for column in frame.columns])
    return frame.to_string(index=False, float_format=lambda value: f"{value:.4g}") + "\n"


_FORMATTED = {
    "table": _table,
    "csv": lambda *given: as_csv(_frame(*given), rows="input"),
    "json": _json,
}
