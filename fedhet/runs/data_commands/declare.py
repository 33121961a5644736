"""Print a declaration of a site's own data (dataset=local), to complete and to agree on."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedhet.core.errors import ConfigError, DataError
from fedhet.data.dataset import MISSING, REFUSE

HEAD = """\
# @package _global_
# An experiment on the sites' own data, made from the data of one site. Name the sites, and check
# that it fits all of them: the same classes and levels of categories, in the same order.
defaults:
  - override /dataset: local
"""
# What add_argument takes.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "data": {"type": Path, "help": "a folder of images, an npz file, or a csv or Parquet table"},
    "--label": {
        "action": "append",
        "help": "the column to learn, in a table; may be given several times",
    },
    "--features": {
        "action": "append",
        "help": "a column of inputs, in a table; may be given several times; default: all columns"
        " except the labels",
    },
    "--category": {
        "action": "append",
        "help": "a column of categories among the inputs of a table; may be given several times;"
        " its levels are read from the file",
    },
    "--missing": {
        "choices": MISSING,
        "default": REFUSE,
        "help": "how to treat missing values of a table; default: refuse",
    },
    "--text": {"help": "the column of texts, if texts are the inputs; needs a tokenizer"},
    "--tokenizer": {
        "help": "the tokenizer.json, or its folder; default: next to the table, or in tokenizer/"
    },
    "--max-length": {"type": int, "default": 128, "help": "tokens of each text (128), >= 1"},
    "--read": {
        "default": "{}",
        "help": "the format of a csv file, with names of pandas.read_csv: '{sep: \";\"}'",
    },
    "--target": {"help": "class, number, labels or next_char; default: derived from the labels"},
}


def main(args: argparse.Namespace) -> None:
    """Print the declaration as an experiment in YAML."""
    from omegaconf import OmegaConf

    from fedhet.data.frames import SUFFIXES

    path: Path = args.data
    is_table = path.suffix.lower() in SUFFIXES
    if (args.features or args.category) and not is_table:
        raise ConfigError(f"--features, --category: {path} is no csv or Parquet table")
    if args.missing != REFUSE and path.is_dir():
        raise ConfigError(
            f"--missing={args.missing}: {path} is a folder; allowed are csv, Parquet and npz files"
        )
    if path.is_dir():
        declared = _folder(path)
    elif is_table:
        declared = _table(path, args)
    else:
        declared = _npz(path, args.target, args.missing)
    if args.missing != REFUSE:
        declared["missing"] = args.missing
    # OmegaConf quotes texts that other YAML readers would read as numbers, such as 1E5.
    print(HEAD + OmegaConf.to_yaml({"dataset": {"sites": ["a", "b"], **declared}}), end="")


def _folder(path: Path) -> dict[str, Any]:
    from fedhet.data.images import list_images, read_images

    listing = list_images(path / "train" if (path / "train").is_dir() else path)
    x = read_images([(str(image), image) for image in listing.paths[:1]])
    return {"classes": list(listing.classes), "shape": list(x.shape[1:]), "dtype": "uint8"}


def _table(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    import yaml

    from fedhet.data.arrays import identifiers
    from fedhet.data.encoding import Cells
    from fedhet.data.frames import CsvFormat, read_frame
    from fedhet.data.local.reading import digest_of
    from fedhet.data.tables import UNNAMED, Columns, check_columns, unrepeated
    from fedhet.data.tokens import Texts

    try:
        form = CsvFormat.of(yaml.safe_load(args.read))
    except yaml.YAMLError as error:
        raise ConfigError(f"--read {args.read!r} must be a mapping in YAML: {error}") from error
    texts = Texts.of(args.text, args.tokenizer, args.max_length, "", path.absolute().parent)
    label: list[str] = args.label
    named = [*(label or []), *(args.category or []), *([args.text] if args.text else [])]
    numbers = () if args.target == "class" else label or ()
    frame = read_frame(path, dict.fromkeys(named, ()), form, numbers)
    if not label:
        columns = [str(column) for column in frame.columns]
        raise ConfigError(
            f"{path}: name the column to learn by --label=<column>; the columns: {columns}"
        )
    features: list[str] = args.features or []
    categories: list[str] = args.category or []
    check_columns(str(path), frame.columns, [*label, *features, *categories])
    learned = label if len(label) > 1 else label[0]
    if not features and texts is None:
        candidates = [c for c in frame.columns if c not in label]
        unnamed = {c for c in candidates if UNNAMED.fullmatch(c)}
        left_out = {*unnamed, *unrepeated(frame, candidates)} - {*categories}
        features = [c for c in candidates if c not in left_out]
        if left_out:
            print(
                "left out of the features, because they have no name, or a different whole number"
                f" in each row (--features adds them): {', '.join(map(repr, sorted(left_out)))}",
                file=sys.stderr,
            )
    texts = texts and replace(texts, filled=True)
    levels = {c: np.unique(identifiers(frame[c].dropna().to_numpy())).tolist() for c in categories}
    cells = Cells(levels, args.missing)
    table_columns = Columns(learned, args.target, None, features or None, texts, cells=cells)
    arrays = table_columns.arrays([(str(path), frame)])
    if texts is None:
        inputs: dict[str, Any] = {
            "features": cells.columns(arrays["columns"].tolist()),
            **({"categories": dict(cells.categories)} if cells.categories else {}),
        }
    else:
        inputs = {
            "text": texts.column,
            "tokenizer": digest_of(texts.file),
            "shape": [texts.max_length],
            "dtype": "int64",
            **texts.described(),
        }
    return {**_target(arrays), **inputs, "label": learned}


def _npz(path: Path, target: str | None, missing: str) -> dict[str, Any]:
    from fedhet.data.arrays import dataset_arrays
    from fedhet.data.tables import array_samples, load_arrays

    found = load_arrays(path, {}, ("x_train", "y_train", "x", "y"))
    x, y = ("x_train", "y_train") if "x_train" in found else ("x", "y")
    if x not in found or y not in found:
        raise DataError(f"{path}: expected the arrays x_train and y_train, or x and y")
    text = "vocabulary" in found
    raw = array_samples(path, found, x, y, text=text, missing=missing)
    classes = len(found["classes"]) if "classes" in found else None  # the names of 0 .. C-1
    stated = str(found.pop("target")) if "target" in found else None
    settings = _target(dataset_arrays(raw, None, classes, target=target or stated) | found)
    kind = "float32" if raw.x.dtype == np.float64 else str(raw.x.dtype)
    settings |= {"shape": list(raw.x.shape[1:]), "dtype": kind}
    if text:
        settings["vocabulary"] = int(found["vocabulary"])
        settings["padding"] = int(found["padding"]) if "padding" in found else None
    return settings


def _target(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of the declaration about the target."""
    kind = str(arrays["target"][0])
    if kind == "number":
        return {"target": kind, "label": arrays["numbers"].tolist()}
    return {"target": kind, "classes": arrays["classes"].tolist()}
