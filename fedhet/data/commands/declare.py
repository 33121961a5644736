"""Print the declaration of a site's own data (dataset=local), to be completed and agreed on."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedhet.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from fedhet.data.tokens import Texts

HEAD = """\
# @package _global_
# An experiment on the sites' own data, after one of them: name the sites, and check that the others
# have the same, above all the same classes in the same order.
defaults:
  - override /dataset: local
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "data", type=Path, help="a folder of images, an npz file, or a csv or Parquet table"
    )
    parser.add_argument(
        "--label",
        action="append",
        help="the column of what is learned, in a table; may be given several times",
    )
    parser.add_argument(
        "--features",
        action="append",
        help="a column of inputs, in a table; may be given several times; default: all others",
    )
    parser.add_argument(
        "--text", help="the column of texts, the inputs in a table; its tokenizer is beside it"
    )
    parser.add_argument("--tokenizer", help="the tokenizer.json, or its folder, elsewhere")
    parser.add_argument(
        "--max-length", type=int, default=128, help="tokens of each text (128), >= 1"
    )
    parser.add_argument(
        "--target", help="class, number, labels or next_char; default: what the labels are"
    )


def main(args: argparse.Namespace) -> int:
    """Print the declaration as an experiment in YAML."""
    import yaml

    from fedhet.data.tokens import Texts

    texts = None
    if args.features and args.text:
        raise ConfigError("--features with --text: the inputs are columns of numbers, or the texts")
    if args.data.suffix in (".csv", ".parquet"):
        beside = args.data.absolute().parent
        texts = Texts.of(args.text, args.tokenizer, args.max_length, "", beside)
    elif args.features:
        raise ConfigError(f"--features with {args.data}: is for a table, csv or Parquet")
    declared = declaration(args.data, args.label, args.target, texts, args.features)
    settings = {"sites": ["a", "b"], **declared}
    text = yaml.safe_dump({"dataset": settings}, sort_keys=False, allow_unicode=True)
    print(HEAD + text, end="")
    return 0


def declaration(
    path: Path,
    label: list[str] | None,
    target: str | None,
    texts: Texts | None = None,
    features: list[str] | None = None,
) -> dict[str, Any]:
    """The settings of dataset=local that these data meet.

    Args:
        path: a site's data.
        label: the columns of what is learned, for a table.
        target: what the labels are; None: what they seem to be.
        texts: the column of texts of a table, with its tokenizer; None: its inputs are numbers.
        features: the columns of inputs of a table; None: all but those of `label`.

    Raises:
        DataError: there are no such data, or they cannot be read.
        ConfigError: a table without `label`, or the labels do not tell what they are.
    """
    from fedhet.data.tables import data_frames

    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder")
    if path.is_dir():
        return _folder(path)
    if path.suffix in data_frames.SUFFIXES:
        return _table(path, label, target, texts, features)
    return _npz(path, target)


def _folder(path: Path) -> dict[str, Any]:
    from fedhet.data.image_files import list_images, read_images

    listing = list_images(path / "train" if (path / "train").is_dir() else path)
    x = read_images([(str(image), image) for image in listing.paths[:1]], None, None)
    return {"classes": list(listing.classes), "shape": list(x.shape[1:]), "dtype": "uint8"}


def _table(
    path: Path,
    label: list[str] | None,
    target: str | None,
    texts: Texts | None,
    features: list[str] | None,
) -> dict[str, Any]:
    from fedhet.data.tables import data_frames

    frame = data_frames.read_frame(path)
    columns = [str(column) for column in frame.columns]
    if not label:
        raise ConfigError(f"{path}: name the column of what is learned, --label; {columns}")
    data_frames.check_columns(str(path), columns, label)
    names = label if len(label) > 1 else label[0]
    inputs: dict[str, Any]
    if texts is None:
        features = features or [column for column in columns if column not in label]
        data_frames.check_columns(str(path), columns, features)
        if twice := [column for column in features if [*features, *label].count(column) > 1]:
            raise ConfigError(f"--features {twice[0]}: is named twice, here or as --label")
        x = data_frames.numeric_columns(frame, features, str(path))
        inputs = {"features": features}
    else:
        from fedhet.data.local.texts import digest_of, tokens_of

        data_frames.check_columns(str(path), columns, [texts.column])
        x = tokens_of(texts, frame, str(path))
        inputs = {"text": texts.column, "tokenizer": digest_of(texts.file)}
        inputs |= {"shape": [texts.max_length], "dtype": "int64", **texts.described()}
    raw = data_frames.raw_samples(x, frame, str(path), names, None)
    return {**_target(raw, target), **inputs, "label": names}


def _npz(path: Path, target: str | None) -> dict[str, Any]:
    from fedhet.data.raw_samples import RawSamples
    from fedhet.data.tables import npz_file

    names = {name: name for name in ("x_train", "y_train", "x", "y")}
    found = npz_file.load_arrays(path, {}, names)
    x, y = ("x_train", "y_train") if "x_train" in found else ("x", "y")
    if x not in found or y not in found:
        raise DataError(f"{path}: expected the arrays x_train and y_train, or x and y")
    text = "vocabulary" in found
    inputs = npz_file.token_numbers if text else npz_file.numeric_inputs
    values = inputs(found[x], f"{path}, array {x!r}")
    raw = RawSamples(values, found[y], None, str(path), f"{path}, array {y!r}")
    stated = str(found["target"]) if "target" in found else None
    settings = _target(raw, target or stated, found.get("classes"))
    if "numbers" in found and settings["target"] == "number":
        settings["label"] = found["numbers"].tolist()
    settings |= {"shape": list(values.shape[1:]), "dtype": str(values.dtype)}
    if text:
        settings["vocabulary"] = int(found["vocabulary"])
        settings["padding"] = int(found["padding"]) if "padding" in found else None
    return settings


def _target(raw: Any, target: str | None, classes: np.ndarray | None = None) -> dict[str, Any]:
    """What is learned; `classes` are the names of 0 .. C-1, where the data state them."""
    from fedhet.data.target import encoded

    _, described = encoded(raw, None, target, None if classes is None else len(classes))
    kind = str(described["target"][0])
    if kind == "number":
        return {"target": kind, "label": described["numbers"].tolist()}
    names = described["classes"] if classes is None else classes
    return {"target": kind, "classes": names.tolist()}
