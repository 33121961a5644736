"""Finds the user's own components: conf folders in packages outside of fedhet.

An installed package names its conf folder by an entry point of the group `fedhet.conf`, such as
`my_package = "my_package.conf"`. This makes the package trusted. An entry point of the group
`fedhet.experiments` names a folder with experiments only, such as papers/ in a clone; its package
is not trusted. The environment variable FEDHET_CONF names further folders, and `--config-dir` adds
to it. Only the machine itself decides on its folders: a run from another machine cannot name one.
No package is imported here.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from fedhet.core.errors import ConfigError, MachineError

ENTRY_POINTS, EXPERIMENTS = "fedhet.conf", "fedhet.experiments"
SEARCH_PATH = "FEDHET_CONF"  # folders separated as in PATH
TRUST = "FEDHET_TRUST"  # packages separated by commas or colons


class Installed(NamedTuple):
    """A folder that an entry point names.

    Attributes:
        folder: the folder.
        package: the package that contains the folder and is trusted, because the user installed
            it. None if a configuration may not name classes of the package.
    """

    folder: Path
    package: str | None


def trusted_packages() -> list[str]:
    """Return the packages other than fedhet from which a configuration may name classes."""
    words = re.split("[,:]", os.environ.get(TRUST, ""))
    named = [word.strip().rstrip(".") for word in words if word.strip(" .")]
    return [*named, *(component.package for component in installed() if component.package)]


def search_path() -> list[Path]:
    """Return the folders in FEDHET_CONF, as absolute paths."""
    words = os.environ.get(SEARCH_PATH, "").split(os.pathsep)
    return [_existing(word, SEARCH_PATH) for word in words if word]


def extend_search_path(words: Sequence[str]) -> None:
    """Put the folders of `--config-dir` first in FEDHET_CONF, also for processes started later.

    Raises:
        ConfigError: a folder does not exist.
    """
    if words:
        added = [_existing(word, "--config-dir") for word in words]
        os.environ[SEARCH_PATH] = os.pathsep.join(map(str, [*added, *search_path()]))


def installed() -> tuple[Installed, ...]:
    """Return the folders that installed packages name.

    Raises:
        ConfigError: an entry point names no folder.
    """
    return _installed(tuple(sys.path))


@lru_cache(maxsize=4)
def _installed(path: tuple[str, ...]) -> tuple[Installed, ...]:
    """Read the entry points of the distributions on this `sys.path`; that takes milliseconds."""
    found = [*entry_points(group=ENTRY_POINTS), *entry_points(group=EXPERIMENTS)]
    found.sort(key=lambda point: (point.name, point.value))
    return tuple(dict.fromkeys(map(_component, found)))


def _component(point: EntryPoint) -> Installed:
    parts = re.split("[.:]", point.value)
    for folder in locations(".".join(parts)):
        if folder.is_dir():
            package = ".".join(parts[:-1]) or parts[0]
            return Installed(folder.resolve(), package if point.group == ENTRY_POINTS else None)
    owner = f" of the installed package {point.dist.name}" if point.dist else ""
    raise ConfigError(
        f"the entry point {point.name} = {point.value!r} (group {point.group}){owner} names no"
        " folder; it must name the folder of the package's yaml files, as in 'my_package.conf'"
    )


def locations(package: str) -> list[Path]:
    """Return the folders of a package, or the file of a module; empty if neither exists.

    Neither the module nor the packages that contain it are imported.
    """
    first, *inner = package.split(".")
    try:
        spec = find_spec(first)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return []
    # A top-level module has no folders, so its own file is used.
    paths = [Path(folder, *inner) for folder in spec.submodule_search_locations or ()]
    files = [path.with_suffix(".py") for path in paths] or [Path(spec.origin or "")] * (not inner)
    return [path for path in paths if path.is_dir()] + [path for path in files if path.is_file()]


def _existing(word: str, origin: str) -> Path:
    folder = Path(word)
    if not folder.is_dir():
        raise MachineError(f"{origin}={word}: there is no such folder")
    return folder.resolve()
