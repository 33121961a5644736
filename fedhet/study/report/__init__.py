"""What one or many runs say, read from their folders: frames, statistics, figures and a page.

Nothing here imports torch and pandas before the folders are known to have runs: that takes seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fedhet.core.errors import clean
from fedhet.study.report.places import Written as Written
from fedhet.study.report.places import run_folders


def write(folder: Path | str | Sequence[Path | str], out: Path | str | None = None) -> Written:
    """Write the report of an experiment, or of any folder with runs.

    Args:
        folder: a folder, or several of the same experiment.
        out: where to; `report` in the (first) folder if None.

    Raises:
        ConfigError: a folder has no runs, none of them has a result, or the folders are of
            different experiments.
        DataError: an experiment.json, or the record of an earlier report, is damaged.
        WriteError: a file cannot be written, is a link, or is not that of an earlier report.
    """
    for each in [folder] if isinstance(folder, str | Path) else folder:
        run_folders(Path(each))
    from fedhet.study.report.page import write_report

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
