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
)
from fedhet.data.tokens import Texts
from fedhet.handover.served import Described, Served, add_arguments, opened

if TYPE_CHECKING:
    import pandas

# These datasets have loaders that convert every image to grey or colour without a setting.
_CONVERTED = {
    "chest_xray": "L",
    "cifar10": "RGB",
    "cifar100": "RGB",
    "cinic10": "RGB",
    "tiny_imagenet": "RGB",
}


def read_inputs(
    described: Described, files: Sequence[Path], array: str | None, tokenizer: str | None
) -> tuple[list[str], Tensor]:
    """Read the samples of the files.

    Args:
        described: the run's description of its inputs.
        files: images, or folders of them; csv or Parquet tables; npz arrays.
        array: the name of the array in npz files; None: the only array, or the run's `x_test`.
        tokenizer: a tokenizer.json or its folder, for texts; None: the run's tokenizer.

    Returns:
        The name of each sample: its file and, unless it is an image file, its row as errors count
        it. And (n, ...), the samples, not normalised.

    Raises:
        ConfigError: the run's model does not accept a file of this kind.
        DataError: a file is missing, damaged, or does not match the run.
    """
    names: list[str] = []
    parts: list[np.ndarray] = []
    for file in _listed(files):
        suffix = file.suffix.lower()
        if suffix == ".npz":
            x = _array(described, file, array)
        elif is_image(file) and described.images:
            x = _image(described, file)
        elif suffix in TABLES and not described.images:
            x = _rows(described, file, tokenizer)
        else:
            kind = (
                "images" if described.images else "texts" if described.text else "rows of numbers"
            )
            raise ConfigError(
                f"{file}: the inputs of this run are {kind} of shape {described.shape}, which are"
                f" read from {', '.join(['.npz', *(IMAGES if described.images else TABLES)])}"
            )
        rows = range(first_row(str(file)), first_row(str(file)) + len(x))
        names += [str(file)] if is_image(file) else [f"{file}:{row}" for row in rows]
        parts.append(x)
    if len({x.dtype for x in parts}) > 1:  # images as uint8 and as floats
        parts = [x / np.float32(255) if are_pixels(x) else x for x in parts]
    return names, torch.from_numpy(np.concatenate(parts))


def _listed(files: Sequence[Path]) -> list[Path]:
    """Return the files, with each folder replaced by its images."""
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
def _image(described: Described, file: Path) -> np.ndarray:
    """Read an image as (1, C, H, W) uint8, resized and converted by the run's settings."""
    dataset = described.config.dataset
    loader = str(dataset.get("_target_", "")).rpartition(".")[2]
    mode = COLOURS.get(dataset.get("colours")) or _CONVERTED.get(loader)
    x = read_images([(str(file), file)], dataset.get("size"), mode)
    if x.shape[1:] != described.shape:
        raise DataError(
            f"{file} has (C, H, W) = {x.shape[1:]}, the run's images have {described.shape};"
            " convert the file, because the run's settings declare no conversion (dataset.size,"
            " dataset.colours)"
        )
    return x


# ---- tables and texts
def _rows(described: Described, file: Path, tokenizer: str | None) -> np.ndarray:
    columns = described.partition.get("columns", [])
    if not columns:
        raise ConfigError(
            f"{file}: the columns of this run have no names, because its data were arrays; use an"
            " npz file"
        )
    dataset = described.config.dataset
    cells = Cells(dataset.get("categories"), MEDIAN if described.median else REFUSE)
    columns = cells.columns(columns)
    names = dict.fromkeys(columns, ()) if described.text else cells.names
    frame = read_frame(file, names, CsvFormat.of(dataset.get("read")))
    if not len(frame):
        raise DataError(f"{file} contains no rows")
    _check_columns(described, file, frame, columns)
    if described.text:
        how = replace(
            _texts(described, file, tokenizer), max_length=described.shape[0], filled=True
        )
        (x,), made = how.encoded({str(file): text_values(frame, columns[0], str(file))})
        for key in ("vocabulary", "padding"):
            if int(made[key]) != described.partition[key]:
                raise DataError(
                    f"{how.file} is not the tokenizer of this run: its {key} is {int(made[key])},"
                    f" but the run's is {described.partition[key]}"
                )
        return x
    return cells.read(frame, columns, str(file))


def _check_columns(
    described: Described, file: Path, frame: pandas.DataFrame, columns: Sequence[str]
) -> None:
    """Refuse a table that lacks a column, or has a column that the run's table did not have.

    Columns of labels and owners are allowed. Extra columns are also allowed if the run chose its
    columns (dataset.features) or a text.
    """
    check_columns(str(file), frame.columns, columns)
    dataset = described.config.dataset
    if dataset.get("features") is not None or described.text:
        return
    label = dataset.get("label")
    known = {*columns, *([label] if isinstance(label, str) else label or []), dataset.get("owner")}
    if extra := [column for column in frame.columns if column not in known]:
        raise DataError(
            f"{file} has the columns {', '.join(extra)}, which this run did not have; its inputs"
            f" are {', '.join(columns)}"
        )


def _texts(described: Described, file: Path, tokenizer: str | None) -> Texts:
    """Return the settings for a file's texts; with dataset=local the site has the tokenizer."""
    dataset = described.config.dataset
    named = Path(tokenizer).absolute() if tokenizer else None
    if "sites" in dataset:
        return declared_texts(
            dataset.text, dataset.tokenizer, described.shape[0], named, file.parent, "--tokenizer"
        )
    data = str(dataset.get("train") if "path" not in dataset else dataset.path)
    places = [root / data for root in roots(described.config.data_dir)]
    place = next((place for place in places if place.exists()), places[0])
    how = Texts.of(
        dataset.text,
        str(named) if named else dataset.tokenizer,
        dataset.max_length,
        described.config.data_dir,
        place if place.is_dir() else place.parent,
    )
    assert how is not None
    return how


# ---- arrays
def _array(described: Described, file: Path, array: str | None) -> np.ndarray:
    with opened_npz(file) as arrays:
        only = arrays.files[0] if len(arrays.files) == 1 else None
        name = array or only or described.config.dataset.get("x_test", "x_test")
        if name not in arrays.files:
            raise ConfigError(
                f"{file} has no array {name!r}; set --array to one of: {', '.join(arrays.files)}"
            )
        check_arrays(arrays, [name])
        x = arrays[name]
    x = numeric_inputs(x, str(file), text=described.text, missing=described.median)
    if x.shape[1:] != described.shape:
        raise DataError(
            f"{file}: its samples have the shape {x.shape[1:]}, the run's have {described.shape}"
        )
    if not len(x):
        raise DataError(f"{file} contains no samples")
    last = described.partition["vocabulary"] - 1
    if described.text and not 0 <= x.min() <= x.max() <= last:
        raise DataError(f"{file}: tokens are {x.min()} to {x.max()}; the run's are 0 to {last}")
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
        "--array", metavar="NAME", help="the array in npz files; default: the only array, or x_test"
    )
    parser.add_argument(
        "--tokenizer", metavar="FILE", help="for texts; default: the run's tokenizer"
    )
    args = parser.parse_args(argv)
    described, served = opened(args.run, args.view, args.client, args.inputs_of)
    names, x = read_inputs(described, args.files, args.array, args.tokenizer)
    outputs, chosen = predict(served, x)
    if not outputs.isfinite().all():
        row = int((~outputs.isfinite().all(1)).nonzero()[0])
        raise DataError(f"{names[row]}: the model returns NaN or infinity for this sample")
    text = _FORMATTED[args.format](described, names, outputs, chosen)
    if args.out is None:
        print(text, end="")
    else:
        write_text(args.out, text)
        print(f"written: {args.out}")
    return 0


def predict(served: Served, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the readable outputs for raw inputs, and the predictions.

    Args:
        served: the model.
        x: (n, ...), the inputs.

    Returns:
        (n, K) probabilities or numbers; and (n, K) booleans: True for the predicted class, for all
        predicted labels, or for all numbers.
    """
    with torch.inference_mode():
        # Like an evaluation, this chooses the class before the softmax: rounding may make the
        # probabilities of two different outputs equal.
        raw = torch.cat([served.raw(part) for part in x.split(_BATCH)])
        outputs = served.readable(raw)
        if served.target == "number":
            return outputs, torch.ones_like(outputs, dtype=torch.bool)
        if served.target == "labels":
            return outputs, raw > 0
        return outputs, torch.zeros_like(raw, dtype=torch.bool).scatter_(
            1, raw.argmax(1, keepdim=True), True
        )


def _predictions(described: Described, chosen: Tensor) -> list[str]:
    names = described.outputs
    return ["; ".join(names[i] for i in row.nonzero()[:, 0].tolist()) for row in chosen]


def _frame(
    described: Described, names: list[str], outputs: Tensor, chosen: Tensor
) -> pandas.DataFrame:
    """Return a table with a row for each sample: its name, the prediction, and all outputs."""
    import pandas

    values = pandas.DataFrame(outputs.numpy())
    if described.target == "number":
        values.columns = pandas.Index(described.outputs)
    else:
        values.columns = pandas.Index([f"p({name})" for name in described.outputs])
        values.insert(0, "prediction", _predictions(described, chosen), allow_duplicates=True)
    values.insert(0, "input", names, allow_duplicates=True)
    return values


def _json(described: Described, names: list[str], outputs: Tensor, chosen: Tensor) -> str:
    samples: list[dict[str, Any]] = []
    for name, row, which in zip(names, outputs.tolist(), chosen, strict=True):
        sample: dict[str, Any] = {"input": name}
        if described.target == "labels":
            sample["prediction"] = [described.outputs[i] for i in which.nonzero()[:, 0].tolist()]
        elif described.target != "number":
            sample["prediction"] = described.outputs[int(which.nonzero())]
        samples.append(sample | {described.output: dict(zip(described.outputs, row, strict=True))})
    return as_json(samples, indent=1)


def _table(described: Described, names: list[str], outputs: Tensor, chosen: Tensor) -> str:
    """Return a table for the terminal; for classes, it shows only the predicted class."""
    import pandas

    if described.target in ("number", "labels"):
        frame = _frame(described, names, outputs, chosen)
    else:
        columns = {"prediction": _predictions(described, chosen), "probability": outputs[chosen]}
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
