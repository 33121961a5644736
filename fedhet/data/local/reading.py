"""What a site has, read as the run declares it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedhet.core.errors import DataError
from fedhet.core.task import ClientData, Samples
from fedhet.data.array_cache import Arrays, cached_arrays, signature
from fedhet.data.federation import split
from fedhet.data.image_files import COLOURS, decoder, list_images, read_images
from fedhet.data.local.declaration import DTYPES, Declaration
from fedhet.data.local.texts import texts_at, tokens_of
from fedhet.data.local.untold import located, untold
from fedhet.data.raw_samples import RawSamples
from fedhet.data.scheme import check_split
from fedhet.data.tables import data_frames, npz_file
from fedhet.data.target import encoded

PARTS = ("train", "val", "test")
# The arrays of an npz file that the run declares; others of those that describe it are the run's
# business (mean and std), or the site's own.
_DECLARED = ("target", "classes", "numbers", "vocabulary", "padding")


@dataclass(frozen=True)
class SiteFiles:
    """Where a site has its data: absolute paths that no run names.

    Args:
        data: a folder of images, an npz file, or a table in a csv or Parquet file. A folder with
            train, val and test, and an npz file with x_train, x_val and x_test, have their parts.
        val, test: further such files or folders, of which one has samples for validation or test.
        tokenizer: the tokenizer.json of texts, or its folder; None: beside the data.
    """

    data: Path
    val: Path | None = None
    test: Path | None = None
    tokenizer: Path | None = None

    @property
    def named(self) -> list[Path]:
        """Those that are given."""
        return [path for path in (self.data, self.val, self.test, self.tokenizer) if path]

    def read(self, declared: Declaration) -> dict[str, Samples]:
        """The parts that the site has, "train" among them.

        Raises:
            DataError: a file is missing or damaged, or its content is not what the run declares;
                the message says what differs.
        """
        found = read(self.data, declared, PARTS, self.tokenizer)
        if "train" not in found:
            raise DataError(f"{self.data} has no samples for training")
        for part, path in (("val", self.val), ("test", self.test)):
            if path is None:
                continue
            if part in found:
                raise DataError(f"{self.data} has samples for {part}, and {path} is given for it")
            found |= read(path, declared, (part,), self.tokenizer)
        return found


def client_data(
    parts: dict[str, Samples], fractions: Any, seed: int, pid: int
) -> dict[str, Samples]:
    """The client's training, validation and test part.

    Those that the site has stay as they are. The others are cut off from its training samples, in
    the proportions of `fractions` (train, val, test) and by the client's own random stream.
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


def as_client(parts: Mapping[str, Samples]) -> ClientData:
    """The parts as a client has them; an empty one is None."""
    val, test = (parts.get(part) for part in PARTS[1:])
    return ClientData(parts["train"], val or None, test or None)


def read(
    path: Path, declared: Declaration, parts: tuple[str, ...], tokenizer: Path | None = None
) -> dict[str, Samples]:
    """Those of the parts that a file or folder has.

    One that does not name its parts is the first of them.

    Raises:
        DataError: as `SiteFiles.read` does.
    """
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder")
    if path.is_dir():
        found = _folder(path, declared, parts)
    elif path.suffix == ".npz":
        found = _npz(path, declared, parts)
    elif path.suffix in data_frames.SUFFIXES:
        found = {parts[0]: _table(path, declared, tokenizer)}
    else:
        raise DataError(
            f"{path}: a site's data are a folder of images, or a file that ends in .npz,"
            f" {' or '.join(data_frames.SUFFIXES)}"
        )
    samples = {}
    for part, arrays in found.items():
        samples[part] = Samples(torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"]))
        _check(f"{path}, {part}", samples[part], declared)
    if len(parts) == 1 and not samples:
        raise DataError(f"{path} has no samples for {parts[0]}")
    return samples


def _check(where: str, samples: Samples, declared: Declaration) -> None:
    shape, dtype = tuple(samples.x.shape[1:]), samples.x.dtype
    expected = declared.shape_of_sample
    if shape != expected:
        raise DataError(f"{where}: a sample has shape {shape}; the run declares {expected}")
    if dtype != DTYPES[declared.dtype]:
        kind = str(dtype).removeprefix("torch.")
        raise DataError(f"{where}: the samples are {kind}; the run declares {declared.dtype}")
    with located(where), untold():
        declared.dataset(samples)


def _encoded(raw: RawSamples, declared: Declaration, *, numbered: bool = False) -> Arrays:
    """x and y; `numbered` says that the labels are positions in the declared classes."""
    names: list[Any] | None = None if declared.target == "number" else list(declared.outputs)
    if names and numbered and declared.target != "labels":
        names = [str(number) for number in range(len(names))]
    with untold():
        (y,), described = encoded(raw, None, declared.target, names)
    if declared.target == "number":
        found = tuple(described["numbers"].tolist())
        if len(found) != len(declared.outputs):
            raise DataError(
                f"{raw.y_source}: {len(found)} numbers per sample; the run declares"
                f" {list(declared.outputs)}"
            )
    return {"x": np.ascontiguousarray(raw.x), "y": y}


# ---- the kinds of files
def _npz(path: Path, declared: Declaration, parts: tuple[str, ...]) -> dict[str, Arrays]:
    def make() -> Arrays:
        names = {f"{axis}_{part}": f"{axis}_{part}" for part in parts for axis in "xy"}
        found = npz_file.load_arrays(path, {}, {**names, "x": "x", "y": "y"})
        _check_description(path, found, declared)
        # Without parts, all of the file is the first one.
        present = {part: (f"x_{part}", f"y_{part}") for part in parts if f"x_{part}" in found}
        present = present or {parts[0]: ("x", "y")}
        arrays: Arrays = {}
        for part, (x, y) in present.items():
            if missing := [name for name in (x, y) if name not in found]:
                raise DataError(
                    f"{path} has no array {missing[0]!r}; expected"
                    f" {', '.join(f'x_{p}, y_{p}' for p in parts)}, or x, y"
                )
            if not len(found[x]) and part != "train":
                continue
            source = f"{path}, array {x!r}"
            inputs = npz_file.token_numbers if declared.tokens else npz_file.numeric_inputs
            with untold():
                values = inputs(found[x], source)
            raw = RawSamples(values, found[y], None, source, f"{path}, array {y!r}")
            read_ = _encoded(raw, declared, numbered="classes" in found)
            arrays |= {f"{axis}_{part}": values for axis, values in read_.items()}
        return arrays

    arrays = cached_arrays(declared.name, _key(declared, "npz", [path], parts), make)
    return _by_part(arrays)


def _check_description(path: Path, found: Arrays, declared: Declaration) -> None:
    """Refuse an npz file that describes its arrays otherwise than the run does."""
    stated: dict[str, Any] = {
        "target": declared.target,
        "classes": None if declared.target == "number" else list(declared.outputs),
        "numbers": list(declared.outputs),
        "vocabulary": declared.vocabulary,
        "padding": declared.padding,
    }
    for key in _DECLARED:
        if key not in found:
            continue
        npz_file.check_descriptive(key, found[key], path)
        own = found[key].tolist()
        if own != stated[key]:
            raise DataError(
                f"{path}: its array {key!r} is {_short(own)}; the run declares"
                f" {_short(stated[key])}"
            )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _table(path: Path, declared: Declaration, tokenizer: Path | None) -> Arrays:
    columns = [declared.text] if declared.text else list(declared.features or ())
    if not columns:
        raise DataError(
            f"{path} is a table; the run declares no columns (dataset.features, dataset.text) but"
            f" samples of shape {declared.shape_of_sample}"
        )
    source = str(path)
    texts = texts_at(declared, tokenizer, path.parent)

    def make() -> Arrays:
        with untold():
            frame = data_frames.read_frame(path)
            # Without a header, the names of the columns are a sample.
            data_frames.check_columns(source, frame.columns, [*columns, *declared.labels])
            if texts is None:
                x = data_frames.numeric_columns(frame, columns, source)
            else:
                x = tokens_of(texts, frame, source)
            raw = data_frames.raw_samples(x, frame, source, declared.label, None)
        return _encoded(raw, declared)

    key = _key(declared, "table", [path], ()) | (texts.key if texts else {})
    return cached_arrays(declared.name, key, make)


def _folder(path: Path, declared: Declaration, parts: tuple[str, ...]) -> dict[str, Arrays]:
    names = list(declared.outputs)
    present = {part: path / part for part in parts if (path / part).is_dir() and part not in names}
    mode = COLOURS[declared.colours]
    found = {}
    for part, folder in (present or {parts[0]: path}).items():
        with located("the run's classes differ from the site's folders"), untold():
            listing = list_images(folder, names)

        def make(listing: Any = listing) -> Arrays:
            images = [(str(image), image) for image in listing.paths]
            with untold():
                return {"x": read_images(images, declared.size, mode)}

        with untold():
            key = _key(declared, "images", listing.paths, (part,)) | decoder()
        labels = np.array(listing.labels)
        if declared.target != "class":
            raise DataError(
                f"{path}: a folder of images has classes; the run declares target={declared.target}"
            )
        found[part] = {**cached_arrays(declared.name, key, make), "y": labels}
    return found


def _key(
    declared: Declaration, kind: str, paths: list[Path], parts: tuple[str, ...]
) -> dict[str, Any]:
    return {
        "local": kind,
        "declared": declared.content,
        "label": declared.labels,
        "size": declared.size,
        "colours": declared.colours,
        "parts": list(parts),
        "files": signature(paths),
    }


def _by_part(arrays: Arrays) -> dict[str, Arrays]:
    parts = [part for part in PARTS if f"x_{part}" in arrays]
    return {part: {"x": arrays[f"x_{part}"], "y": arrays[f"y_{part}"]} for part in parts}
