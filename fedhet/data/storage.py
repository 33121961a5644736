"""Writing files: a file is written completely or not at all, and a failure raises WriteError."""

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
FORMULA = re.compile(r"\s*[=+\-@＝＋－＠]|[\t\r\n]")  # the start of a formula
NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)
LARGEST_HEADER = 2**20  # of a safetensors file; a ResNet-152 has 100,000 bytes


def unwritable(path: Path, error: Exception) -> WriteError:
    """Return the error for an unwritable file: it names file, folder and cause in one line."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (found := re.search(r"os error (\d+)", str(error))):  # from safetensors
        number = int(found[1])
    cause = os.strerror(number) if number else str(error)
    return WriteError(f"{path.name} cannot be written in {path.parent}: {cause}")


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder, and rename it to `path` after the block.

    The folder is created if it is missing.

    Raises:
        WriteError: the file cannot be written; the temporary file is removed and `path` is
            unchanged.
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
    """Yield a temporary folder, and rename it to `folder` once its files are on the disk.

    Args:
        folder: the folder to write.
        replaces: whether an existing `folder` with files is replaced; otherwise that is an error.

    Raises:
        WriteError: the folder cannot be written; the temporary folder is removed. Without
            `replaces`, `folder` is unchanged.
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
    """Return the frame as csv in which spreadsheet programs find no formula.

    Texts that look like a formula get an apostrophe in front.

    Args:
        frame: the table.
        rows: the column that identifies the rows. It gets no apostrophes, so that other files can
            be searched for its texts.
    """
    import pandas

    safe = frame.copy()
    for place, (name, column) in enumerate(frame.items()):
        if column.dtype.kind == "O":
            # Not Series.map, which turns whole numbers into floats if the column also has others.
            values = [_in_a_cell(value, identifies=name == rows) for value in column]
            safe.isetitem(place, pandas.Series(values, frame.index, dtype=object))
    header: Any = [_in_a_cell(name) for name in frame.columns]
    return safe.to_csv(index=False, header=header, lineterminator="\n")


def _in_a_cell(value: Any, identifies: bool = False) -> Any:
    """Return the value; a text that looks like a formula gets an apostrophe in front."""
    if not isinstance(value, str):
        return value
    if not identifies and FORMULA.match(value) and not NUMBER.fullmatch(value):
        value = f"'{value}"
    return value.replace("\r\n", "\n").replace("\r", "\n")  # the writer quotes no single \r


def write_json(path: Path, value: Any, indent: int | None = 1) -> None:
    """Write a JSON file; NaN and infinity become null. Without `indent`, the file has no spaces.

    Raises:
        WriteError: as `written` does.
    """
    write_text(path, as_json(value, indent, None if indent else (",", ":")))


def as_json(
    value: Any, indent: int | None = None, separators: tuple[str, str] | None = None
) -> str:
    """Return the value as JSON with a line break at the end; NaN and infinity become null.

    NumPy arrays of whole numbers become lists.
    """
    form: Any = {"indent": indent, "separators": separators, "allow_nan": False}
    return json.dumps(_plain(value), default=lambda array: array.tolist(), **form) + "\n"


def _plain(value: Any) -> Any:
    """Replace NaN and infinity (scores of a diverged model) by None, because JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_tensors(path: Path, tree: Tree) -> None:
    """Write a safetensors file with the mode that the umask gives new files.

    safetensors itself always uses the mode 0600.

    Raises:
        WriteError: as `written` does.
    """
    import safetensors.torch  # here, because torch takes a second and not every process needs it

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
        if not path.is_file():  # reading from a pipe might never end
            raise ValueError("there is no such file")
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
        if header > LARGEST_HEADER:  # parsing it would take too much time and memory
            raise ValueError(f"its header has {header} bytes; at most {LARGEST_HEADER} are read")
        return safetensors.torch.load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"{path} is damaged, or cannot be read: {error}") from error


@contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Convert errors of a model that the values of a file do not fit into errors of that file.

    Raises:
        DataError: the block raised ValueError or RuntimeError.
    """
    try:
        yield
    except (ValueError, RuntimeError) as error:
        raise DataError(
            f"{path} does not fit the model that the run's config.yaml describes: {error}"
        ) from error


def append_line(path: Path, line: str) -> None:
    """Append a line completely or not at all.

    Raises:
        WriteError: the line cannot be written; the file is unchanged.
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
    """A JSON file that can be replaced once more even if the disk is full.

    A spare file in the same folder reserves the space in advance.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._spare = path.with_name(f".{path.name}.spare")

    def write(self, value: Any) -> None:
        """Write the file and, the first time, reserve the space for its last version.

        Raises:
            WriteError: the disk has no space for the file or for the reserve.
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
        """Write the file into the reserved space, and flush it to the disk.

        Raises:
            WriteError: the file cannot be written; it is unchanged.
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
