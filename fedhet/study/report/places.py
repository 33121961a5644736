"""Which folders have runs, and where a report of them is."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from fedhet.core.errors import ConfigError, WriteError

EXPERIMENT = "experiment.json"
SUMMARY = "summary.json"


class Written(NamedTuple):
    """A report that has been written.

    Attributes:
        page: its index.html.
        sentences: the summary at its top, one sentence each.
    """

    page: Path
    sentences: list[str]


def run_folders(folder: Path) -> list[Path]:
    """Return the run folders in a folder; none for an experiment, which names its own.

    Raises:
        ConfigError: there is no such folder, it has no runs, or it holds several experiments.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder")
    if (folder / EXPERIMENT).exists():
        return []
    if inner := sorted(path.parent.name for path in folder.rglob(EXPERIMENT)):
        raise ConfigError(f"{folder} holds the experiments {', '.join(inner)}; name one of them")
    found = sorted(path.parent for path in folder.rglob(SUMMARY))
    if not found:
        raise ConfigError(
            f"{folder} has no runs: neither {EXPERIMENT} nor a folder with a {SUMMARY}"
        )
    return found


def refuse_links(*paths: Path) -> None:
    """Refuse folders and files of a report that lie elsewhere.

    Raises:
        WriteError: one of them is a link.
    """
    for path in paths:
        if path.is_symlink():
            raise WriteError(
                f"{path} is a link, and a report writes through none: remove it, or name another"
                " folder with --out"
            )
