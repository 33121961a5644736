"""The places of data files and caches on disk, and the logger of this package."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from glob import escape
from pathlib import Path

import psutil

from fedhet.core import check
from fedhet.core.errors import ConfigError, DataError

log = logging.getLogger("fedhet.data")
# A folder under data_dir, and names or glob patterns of its required contents.
Layout = tuple[str, Sequence[str]]
SITE_HINT = "Name the site's file in dataset.files"
DATA_DIR = "FEDHET_DATA_DIR"
_confined = ContextVar("confined", default=False)


class NotFound(DataError):
    """A file does not exist, or a run may not name it. The message quotes no file's contents."""


@contextmanager
def confined() -> Iterator[None]:
    """Allow settings from another machine to name only files in FEDHET_DATA_DIR."""
    token = _confined.set(True)
    try:
        yield
    finally:
        _confined.reset(token)


def permitted(path: Path) -> Path:
    """Return `path`, if a setting may name it.

    Raises:
        NotFound: the settings are `confined`, and the path is not in FEDHET_DATA_DIR.
    """
    base = os.environ.get(DATA_DIR)
    inside = base and path.is_relative_to(Path(base).expanduser().absolute())
    if _confined.get() and (".." in path.parts or not inside):
        where = "below its FEDHET_DATA_DIR" if base else "in its FEDHET_DATA_DIR, which is not set"
        raise NotFound(f"{path}: a run may name only files of this machine {where}")
    return path


def cache_root() -> Path:
    """Return `$FEDHET_CACHE`, or `~/.cache/fedhet` if it is not set."""
    return Path(os.environ.get("FEDHET_CACHE") or Path.home() / ".cache" / "fedhet")


def find_folder(
    data_dir: str, layouts: Sequence[Layout], hint: str, others: Sequence[Path] = ()
) -> Path:
    """Return the first folder that has all required contents of a layout.

    Args:
        data_dir: an absolute or relative folder. A relative folder is looked for under
            FEDHET_DATA_DIR (environment variable), then under the working directory. The default
            "data" also means FEDHET_DATA_DIR itself.
        layouts: pairs (folder under `data_dir`, names or patterns of its required contents), in
            order of preference.
        hint: how to get the data, for the error message.
        others: further folders that `data_dir` may mean; they are tried last.

    Raises:
        ConfigError: the name of a folder is not text.
        NotFound: no place matches a layout; the message lists the places and the expected contents.
    """
    for folder, _ in layouts:
        check.text("dataset.folder", folder)
    places = [
        (permitted(root / folder), names)
        for root in [*roots(data_dir), *others]
        for folder, names in layouts
    ]
    for place, names in places:
        if place.is_dir() and all(any(place.glob(name)) for name in names):
            return place
    wanted = [f"{place} with {', '.join(names)}" if names else place for place, names in places]
    raise NotFound(
        f"data not found (data_dir={data_dir!r}): looked for {'; '.join(map(str, wanted))}."
        f" {hint}, or set data_dir or FEDHET_DATA_DIR"
    )


def find_file(data_dir: str, key: str, file: object) -> Path:
    """Return the file that the setting `dataset.<key>` names, absolute or under `data_dir`.

    Raises:
        ConfigError: the setting is not text, or names a folder.
        DataError: the file does not exist.
    """
    hint = f"Put your data there, name the file in dataset.{key}"
    path = find_path(data_dir, check.text(f"dataset.{key}", file), hint)
    if path.is_dir():
        raise ConfigError(f"dataset.{key}={file}: {path} is a folder, not a file")
    return path


def find_path(data_dir: str, name: str, hint: str) -> Path:
    """Return the file or folder of this name, absolute or under `data_dir`; see `find_folder`.

    With the default `data_dir`, the working directory is searched, too, unless the settings are
    `confined`.
    """
    path = Path(name)
    contents = [escape(path.name)] if path.name else []  # "." and "/" have no name
    for root in roots(data_dir):
        permitted(root / name)
    here = [] if _confined.get() or data_dir != "data" else [Path.cwd()]
    return find_folder(data_dir, [(str(path.parent), contents)], hint, here) / path.name


def roots(data_dir: str) -> list[Path]:
    """Return the folders that `data_dir` can mean, in order of preference."""
    path = Path(data_dir).expanduser()
    if path.is_absolute():
        return [path]
    roots = []
    if environment := os.environ.get(DATA_DIR):
        base = Path(environment).expanduser().absolute()
        roots.append(base / path)
        if data_dir == "data":
            roots.append(base)
    return roots if roots and _confined.get() else [*roots, Path.cwd() / path]


def download_hint(dataset: str, data_dir: str) -> str:
    """Return a hint: the command that downloads a dataset, or explains how to get it by hand."""
    option = "" if data_dir == "data" else f" --data-dir {data_dir}"
    return f"Get it with: python -m fedhet data download {dataset}{option}"


def check_memory(claimed: int, what: str = "its content") -> None:
    """Refuse data that need more bytes than this machine has memory.

    Raises:
        DataError: the data are too large; the message names both sizes.
    """
    if claimed > (most := psutil.virtual_memory().total):
        raise DataError(f"{what} needs {claimed} bytes of memory; this machine has {most}")
