"""Reading a site's files and checking them against the run's declaration.

The readers are the same as for other data. Nothing is copied to disk. The tokenizer of a column of
texts is not secret, but it determines the meaning of the token numbers. Therefore the run declares
the SHA-256 of the tokenizer's file, and each site keeps the file next to its data or at a path that
its operator sets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedhet.core.errors import ConfigError, DataError
from fedhet.core.task import PARTS, Samples
from fedhet.data.arrays import encoded
from fedhet.data.federation import split
from fedhet.data.frames import SUFFIXES, CsvFormat
from fedhet.data.images import COLOURS, list_images, log_unread, read_images
from fedhet.data.local.declaration import DTYPES, Declaration
from fedhet.data.partition import check_split
from fedhet.data.tables import Columns, array_samples, described, load_arrays
from fedhet.data.tokens import Texts, find_tokenizer


@contextmanager
def located(where: str) -> Iterator[None]:
    """Convert ConfigError and OSError of a block to DataError, and prefix messages with `where`."""
    try:
        yield
    except (ConfigError, DataError, OSError) as error:
        raise DataError(f"{where}: {error}") from error


@dataclass(frozen=True)
class SiteFiles:
    """The absolute paths of a site's data. The site sets them; no run can.

    Args:
        data: a folder of images, an npz file, or a table in a csv or Parquet file. A folder with
            train, val and test, or an npz file with x_train, x_val and x_test, defines its parts.
        val, test: files or folders with the samples for validation or test.
        tokenizer: the tokenizer.json of texts, or its folder; None: in the folder of the data.
        form: the format of csv files.
    """

    data: Path
    val: Path | None = None
    test: Path | None = None
    tokenizer: Path | None = None
    form: CsvFormat = field(default_factory=CsvFormat)

    def read(self, declared: Declaration) -> dict[str, Samples]:
        """Read the parts that the site has; "train" is always one of them.

        Raises:
            DataError: a file is missing or damaged, or its content does not match the run's
                declaration; the message says how they differ.
        """
        found = read(self.data, declared, PARTS, self.form, self.tokenizer)
        if "train" not in found:
            raise DataError(f"{self.data} has no samples for training")
        for part, path in (("val", self.val), ("test", self.test)):
            if path is None:
                continue
            if part in found:
                raise DataError(f"{self.data} already has samples for {part}; leave out {path}")
            found |= read(path, declared, (part,), self.form, self.tokenizer)
        return found


def client_data(
    parts: dict[str, Samples], fractions: Any, seed: int, pid: int
) -> dict[str, Samples]:
    """Return the client's training, validation and test part.

    Validation and test parts that the site has are unchanged. Other parts are cut off from its
    training samples, in the proportions of `fractions` (train, val, test). The client's own random
    stream draws them.
    """
    wanted = dict(zip(PARTS, check_split(fractions), strict=True))
    cut = [0.0 if part != "train" and part in parts else wanted[part] for part in PARTS]
    if not any(cut[1:]):
        return parts
    train = parts["train"]
    shares = [share / sum(cut) for share in cut]
    found = {}
    for part, rows in zip(PARTS, split(len(train), shares, seed, pid), strict=True):
        index = torch.from_numpy(rows)
        found[part] = Samples(train.x.index_select(0, index), train.y.index_select(0, index))
    return {
        part: parts[part] if part in parts and part != "train" else found[part] for part in PARTS
    }


def read(
    path: Path,
    declared: Declaration,
    parts: tuple[str, ...],
    form: CsvFormat,
    tokenizer: Path | None = None,
) -> dict[str, Samples]:
    """Read the given parts from a file or folder, as far as it has them.

    A file or folder that does not name its parts becomes the first part.

    Raises:
        DataError: see `SiteFiles.read`.
    """
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder")
    if path.is_dir():
        found = _folder(path, declared, parts)
    elif path.suffix.lower() == ".npz":
        found = _npz(path, declared, parts)
    elif path.suffix.lower() in SUFFIXES:
        found = {parts[0]: _table(path, declared, form, tokenizer)}
    else:
        raise DataError(
            f"{path}: a site's data must be a folder of images, or a file that ends in .npz,"
            f" {' or '.join(SUFFIXES)}"
        )
    for part, samples in found.items():
        where = f"{path}, {part}"
        shape, dtype = tuple(samples.x.shape[1:]), samples.x.dtype
        expected = declared.shape_of_sample
        if shape != expected:
            raise DataError(f"{where}: a sample has shape {shape}; the run declares {expected}")
        if dtype == torch.float64:  # a table that is not normalised yet
            dtype = torch.float32
        if dtype != DTYPES[declared.dtype]:
            kind = str(dtype).removeprefix("torch.")
            raise DataError(f"{where}: the samples are {kind}; the run declares {declared.dtype}")
        with located(where):
            declared.dataset(samples)
    if len(parts) == 1 and not found:
        raise DataError(f"{path} has no samples for {parts[0]}")
    return found


def _samples(x: np.ndarray, y: np.ndarray) -> Samples:
    return Samples(torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(y))


def _npz(path: Path, declared: Declaration, parts: tuple[str, ...]) -> dict[str, Samples]:
    names = [f"{axis}_{part}" for part in parts for axis in "xy"]
    found = load_arrays(path, {}, [*names, "x", "y"])
    outputs = list(declared.outputs)
    number = declared.target == "number"
    # Arrays such as mean and std are not compared: the run decides them.
    stated: dict[str, Any] = {
        "target": declared.target,
        "classes": None if number else outputs,
        "numbers": outputs,
        "vocabulary": declared.vocabulary,
        "padding": declared.padding,
    }
    for key, values in described(path, found, stated).items():
        if (own := values.tolist()) != stated[key]:
            raise DataError(
                f"{path}: its array {key!r} is {own!s:.200}; the run declares {stated[key]!s:.200}"
            )
    classes = None if number else outputs
    if classes and "classes" in found and declared.target != "labels":  # y: positions in `classes`
        classes = [str(position) for position in range(len(outputs))]
    # A file without parts becomes the first part.
    present = {part: (f"x_{part}", f"y_{part}") for part in parts if f"x_{part}" in found}
    samples = {}
    for part, (x, y) in (present or {parts[0]: ("x", "y")}).items():
        if missing := [name for name in (x, y) if name not in found]:
            raise DataError(
                f"{path} has no array {missing[0]!r}; expected"
                f" {', '.join(f'x_{p}, y_{p}' for p in parts)}, or x, y"
            )
        if not len(found[x]) and part != "train":
            continue
        how: Any = {"text": declared.tokens, "missing": declared.missing}
        raw = array_samples(path, found, x, y, **how)
        (targets,), _ = encoded(raw, None, declared.target, classes)
        samples[part] = _samples(raw.x, targets)
    return samples


def _table(path: Path, declared: Declaration, form: CsvFormat, tokenizer: Path | None) -> Samples:
    if not declared.text and not declared.features:
        raise DataError(
            f"{path} is a table, but the run declares no columns (dataset.features, dataset.text);"
            f" it declares samples of shape {declared.shape_of_sample}"
        )
    texts = None
    if declared.text is not None and declared.tokenizer is not None:
        (tokens,) = declared.shape_of_sample
        texts = declared_texts(declared.text, declared.tokenizer, tokens, tokenizer, path.parent)
        for key, own in texts.described().items():
            if own != getattr(declared, key):
                raise DataError(
                    f"{texts.file}: its {key} is {own}; the run declares {getattr(declared, key)}"
                )
    classes = None if declared.target == "number" else list(declared.outputs)
    fields = declared.label, declared.target, classes, declared.features, texts
    columns = Columns(*fields, cells=declared.cells)
    arrays = columns.arrays([(str(path), columns.frame(path, form))])
    return _samples(arrays["x"], arrays["y"])


def _folder(path: Path, declared: Declaration, parts: tuple[str, ...]) -> dict[str, Samples]:
    if declared.target != "class":
        raise DataError(
            f"{path}: a folder of images has classes; the run declares target={declared.target}"
        )
    names = list(declared.outputs)
    present = {part: path / part for part in parts if (path / part).is_dir() and part not in names}
    found = {}
    paths: list[Path] = []
    for part, folder in (present or {parts[0]: path}).items():
        with located("the run's classes differ from the site's folders"):
            listing = list_images(folder, names)
        images = [(str(image), image) for image in listing.paths]
        x = read_images(images, declared.size, COLOURS[declared.colours])
        found[part] = _samples(x, np.array(listing.labels))
        paths += listing.paths
    log_unread(path, paths)
    return found


# ---- texts


def digest_of(tokenizer: Path) -> str:
    """Return the SHA-256 of a tokenizer.json, 64 hexadecimal digits."""
    return hashlib.sha256(tokenizer.read_bytes()).hexdigest()


def declared_texts(
    column: str,
    digest: str,
    tokens: int,
    named: Path | None,
    folder: Path,
    option: str = """--node-config '... tokenizer="/path"'""",
) -> Texts:
    """Return the texts of a column, with the tokenizer that the run declares.

    Args:
        column: the name of the column.
        digest: the SHA-256 of the tokenizer.
        tokens: the number T of tokens of each text; shorter texts are padded.
        named: the tokenizer.json or its folder; None: in the folder of the data.
        folder: the folder of the data.
        option: the option that sets `named`, for messages.

    Raises:
        DataError: there is no tokenizer, or its SHA-256 differs.
    """
    folders = [folder, folder / "tokenizer"] if named is None else [named]
    advice = f"Put it into the folder of the data, or its folder tokenizer, or name it: {option}"
    file = find_tokenizer(folders, f"dataset.text={column}", advice)
    if (own := digest_of(file)) != digest:
        raise DataError(
            f"{file} is not the tokenizer of this run: its SHA-256 begins with {own[:16]}, but"
            f" dataset.tokenizer begins with {digest[:16]}"
        )
    return Texts(column, file, tokens, filled=True)
