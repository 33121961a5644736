"""What one or many runs say, read from their folders: frames, statistics, figures and a page.

Nothing here imports torch and pandas before the folders are known to have runs: that takes seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fedhet.core.errors import ConfigError, clean

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


def write(folder: Path | str | Sequence[Path | str], out: Path | str | None = None) -> Written:
    """Write the report of an experiment, or of any folder with runs.

    Args:
        folder: a folder, or several of the same experiment.
        out: where to; `report` in the (first) folder if None.

    Raises:
        ConfigError: a folder has no runs, none of them has a result, or the folders are of
            different experiments.
        WriteError: a file cannot be written.
    """
    for each in [folder] if isinstance(folder, str | Path) else folder:
        run_folders(Path(each))
    from fedhet.report.page import write_report

    return write_report(folder, out)


def main(argv: Sequence[str]) -> int:
    """The report of an experiment, or of any folder with runs; print its summary and its place."""
    parser = argparse.ArgumentParser(
        prog="python -m fedhet report",
        description=main.__doc__,
    )
    parser.add_argument(
        "folders",
        nargs="+",
        type=Path,
        metavar="FOLDER",
        help="an experiment, a sweep, outputs/, or several parts of one experiment",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where to; default: report/ in the first folder"
    )
    args = parser.parse_args(argv)
    written = write(args.folders, args.out)
    for sentence in written.sentences:
        print(clean(sentence))
    print(f"report: {written.page}")
    return 0
