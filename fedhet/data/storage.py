"""Files that are written whole or not at all, and that say so if they cannot be written."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from fedhet.core.errors import DataError, WriteError

if TYPE_CHECKING:
    import pandas

    from fedhet.core.trees import Tree

SPARE_BYTES = 2**16
FORMULA = re.compile(r"\s*[=+\-@＝＋－＠]|[\t\r\n]")  # what begins one
NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)
LARGEST_HEADER = 2**20  # of a safetensors file; a ResNet-152 has 100,000 bytes


def unwritable(path: Path, error: Exception) -> WriteError:
    """The error to raise where `path` could not be written: file, folder and cause in one line."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (found := re.search(r"os error (\d+)", str(error))):  # from safetensors
        number = int(found[1])
    cause = os.strerror(number) if number else str(error)
    return WriteError(f"{path.name} cannot be written in {path.parent}: {cause}")


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """Give the block a file beside `path`, which becomes `path` once the block has written it.

    The folder is created if it is missing.

    Raises:
        WriteError: the file cannot be written; nothing of it is left, and `path` is as it was.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)  # it could be a link to another file
        yield part
        part.replace(path)
    except (OSError, SafetensorError) as error:
        raise unwritable(path, error) from error
    finally:
        with suppress(OSError):
            part.unlink()


@contextmanager
def written_folder(folder: Path, *, replaces: bool = False) -> Iterator[Path]:
    """Give the block a new folder, which becomes `folder` once it is on the disk.

    Args:
        folder: the folder to write.
        replaces: whether it takes the place of one that has files; else that is an error.

    Raises:
        WriteError: it cannot be written; nothing of it is left, and `folder` is as it was.
    """
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        yield part
        for path in (*part.rglob("*"), part):
            sync(path)
        if replaces:
            shutil.rmtree(folder, ignore_errors=True)
        part.replace(folder)
        sync(folder.parent)
    except OSError as error:
        raise unwritable(folder, error) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file.

    Raises:
        WriteError: as `written` does.
    """
    with written(path) as part:
        part.write_text(text, encoding="utf-8")


def as_csv(frame: pandas.DataFrame, rows: str) -> str:
    """The frame as csv, in which no text is a formula to a program for spreadsheets.

    Args:
        frame: the table.
        rows: the column that identifies the rows, by which they can be found elsewhere: it stays
            as it is, as numbers do.
    """
    import pandas

    safe = frame.copy()
    for place, (name, column) in enumerate(frame.items()):
        if column.dtype.kind == "O":
            # Not Series.map, which makes floats of whole numbers beside others.
            values = [_in_a_cell(value, identifies=name == rows) for value in column]
            safe.isetitem(place, pandas.Series(values, frame.index, dtype=object))
    header: Any = [_in_a_cell(name) for name in frame.columns]
    return safe.to_csv(index=False, header=header, lineterminator="\n")


def _in_a_cell(value: Any, identifies: bool = False) -> Any:
    """The value; a text that would be taken for a formula has an apostrophe before it."""
    if not isinstance(value, str):
        return value
    if not identifies and FORMULA.match(value) and not NUMBER.fullmatch(value):
        value = f"'{value}"
    return value.replace("\r\n", "\n").replace("\r", "\n")  # the writer quotes no single \r


def write_json(path: Path, value: Any, indent: int | None = 1) -> None:
    """Write a JSON file; NaN and infinity become null.

    Raises:
        WriteError: as `written` does.
    """
    write_text(path, as_json(value, indent))


def as_json(value: Any, indent: int | None = None) -> str:
    """The value as JSON with a line break at its end; NaN and infinity become null."""
    return json.dumps(_plain(value), indent=indent, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """Replace NaN and infinity, the scores of a diverged model, by null: JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def sync(path: Path) -> None:
    """Put a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_tensors(path: Path, tree: Tree) -> None:
    """Write a safetensors file with the mode that every new file has here.

    safetensors itself gives its files the mode 0600, whatever the umask.

    Raises:
        WriteError: as `written` does.
    """
    import safetensors.torch  # torch takes a second, and a sweep's first process needs none

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tree.items()}
    with written(path) as part:
        part.touch()
        mode = part.stat().st_mode
        safetensors.torch.save_file(tensors, part)
        part.chmod(mode)


def read_tensors(path: Path) -> Tree:
    """Read a safetensors file.

    Raises:
        DataError: it cannot be read, or is damaged.
    """
    import safetensors.torch

    try:
        if not path.is_file():  # to read from a pipe might not end
            raise ValueError("there is no such file")
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
        if header > LARGEST_HEADER:  # its names would take more time and memory than its values
            raise ValueError(f"its header has {header} bytes; at most {LARGEST_HEADER} are read")
        return safetensors.torch.load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"{path} is damaged, or cannot be read: {error}") from error


@contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Let values that do not fit a model be an error of the file that they come from.

    Raises:
        DataError: the block has found that they do not fit.
    """
    try:
        yield
    except (ValueError, RuntimeError) as error:
        raise DataError(
            f"{path} does not fit the model that the run's config.yaml describes: {error}"
        ) from error


def append_line(path: Path, line: str) -> None:
    """Append a line, whole or not at all.

    Raises:
        WriteError: the line cannot be written; the file is as it was.
    """
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab") as file:
            file.write(line.encode())
    except OSError as error:
        with suppress(OSError):
            os.truncate(path, size)
        raise unwritable(path, error) from error


class LastingJson:
    """A JSON file that can be replaced once more when the disk has become full.

    The room for it is taken in advance, by a file beside it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._spare = path.with_name(f".{path.name}.spare")

    def write(self, value: Any) -> None:
        """Write the file and, the first time, take the room for its last version.

        Raises:
            WriteError: there is no room for one of the two.
        """
        write_json(self._path, value)
        if self._spare.exists():
            return
        try:
            self._spare.write_bytes(bytes(SPARE_BYTES))
        except OSError as error:
            with suppress(OSError):
                self._spare.unlink()
            raise unwritable(self._path, error) from error

    def write_last(self, value: Any) -> None:
        """Write the file into the room that was taken for it, and put it on the disk.

        Raises:
            WriteError: the file cannot be written; it is as it was.
        """
        if not self._spare.exists():
            write_json(self._path, value)
            return
        try:
            with self._spare.open("r+b") as file:
                file.write(as_json(value, indent=1).encode())
                file.truncate()
            sync(self._spare)
            self._spare.replace(self._path)
            sync(self._path.parent)
        except OSError as error:
            raise unwritable(self._path, error) from error
