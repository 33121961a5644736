"""Find the run folders for a report; check the places of its files."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from fedhet.core.errors import ConfigError, WriteError

EXPERIMENT = "experiment.json"
SUMMARY = "summary.json"


class Written(NamedTuple):
    """A report on the disk.

    Attributes:
        page: the path of its index.html.
        sentences: the sentences of its summary.
    """

    page: Path
    sentences: list[str]


def run_folders(folder: Path) -> list[Path]:
    """Return the run folders in a folder; none if it has an experiment.json, which names them.

    Raises:
        ConfigError: there is no such folder, it has no runs, or it holds several experiments.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder")
    if (folder / EXPERIMENT).exists():
        return []
    if inner := sorted(path.parent.name for path in folder.rglob(EXPERIMENT)):
        raise ConfigError(
            f"{folder} holds the experiments {', '.join(inner)}; give the folder of one of them"
        )
    found = sorted(path.parent for path in folder.rglob(SUMMARY))
    if not found:
        raise ConfigError(
            f"{folder} has no runs: it has neither an {EXPERIMENT} nor a folder with a {SUMMARY}"
        )
    return found


def refuse_links(*paths: Path) -> None:
    """Refuse links among the folders and files of a report.

    Raises:
        WriteError: one of the paths is a link.
    """
    for path in paths:
        if path.is_symlink():
            raise WriteError(
                f"{path} is a link, and a report does not write through links: remove the link, or"
                " give another folder with --out"
            )
