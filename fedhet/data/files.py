"""Where data files lie."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedhet import check
from fedhet.errors import DataError

IMAGES = (".png", ".jpg", ".jpeg")

Layout = tuple[str, Sequence[str]]


def _roots(data_dir: str) -> list[Path]:
    path = Path(data_dir).expanduser()
    if path.is_absolute():
        return [path]
    env = os.environ.get("FEDHET_DATA_DIR")
    base = [Path(env).expanduser().absolute()] if env else []
    return [
        *(root / path for root in base),
        *(base if data_dir == "data" else []),
        Path.cwd() / path,
    ]


def find(data_dir: str, layouts: Sequence[Layout], hint: str) -> Path:
    """The first folder that holds everything that one of `layouts` asks for.

    Args: data_dir: an absolute folder, or a relative one: it is then looked for under the
        environment's FEDHET_DATA_DIR (the default "data" also stands for FEDHET_DATA_DIR itself)
        and then under the working directory. layouts: pairs (folder under data_dir, the names or
        patterns of what it must hold), the preferred first. hint: how to get the data, for the
        message.

    Raises:
        ConfigError: the folder is no text.
        DataError: no place holds a layout; it lists the places and what was expected there.
    """
    for folder, _ in layouts:
        check.text("dataset.folder", folder)
    places = [(root / folder, names) for root in _roots(data_dir) for folder, names in layouts]
    for place, names in places:
        if all(any(place.glob(name)) for name in names):
            return place
    looked = "".join(f"\n  {place} with {', '.join(names)}" for place, names in places)
    raise DataError(
        f"data not found (data_dir={data_dir!r}). Looked for:{looked}\n{hint}, or set data_dir or"
        " FEDHET_DATA_DIR"
    )


def downloading(dataset: str, data_dir: str) -> str:
    """The hint for a dataset that has a publisher: the command that gets it, or says how to get it
    by hand."""
    return f"Get it with: python -m fedhet.data download {dataset}" + (
        f" --data-dir {data_dir}" if data_dir != "data" else ""
    )


@dataclass(frozen=True)
class Listing:
    """Image files and their labels: positions in `classes`."""

    paths: list[Path]
    labels: list[int]
    classes: tuple[str, ...]


def list_images(folder: Path, classes: Sequence[str] | None = None, inner: str = "") -> Listing:
    """The images of `<folder>/<class>/<inner>`, all in alphabetical order; `classes` fixes what is
    allowed."""
    found = tuple(
        sorted(
            entry.name
            for entry in folder.iterdir()
            if entry.is_dir() and not entry.name.startswith(".")
        )
    )
    names = found if classes is None else tuple(classes)
    if unknown := sorted(set(found) - set(names)):
        raise DataError(
            f"{folder} has the class folders {unknown}, which the training images lack; their"
            f" classes are {list(names)}"
        )
    paths, labels = [], []
    for name in found:
        images = sorted(
            path
            for path in (folder / name / inner).glob("*")
            if path.suffix.lower() in IMAGES and path.name[0] != "."
        )
        if not images and classes is None:
            raise DataError(
                f"{folder / name / inner} holds no image; expected *{' or *'.join(IMAGES)}, because"
                " each folder is a class"
            )
        paths += images
        labels += [names.index(name)] * len(images)
    if not paths:
        raise DataError(
            f"{folder} holds no image; expected {folder}/<class>/*{' or *'.join(IMAGES)}"
        )
    return Listing(paths, labels, names)
