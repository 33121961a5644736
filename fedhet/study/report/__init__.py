"""Reports on one or many runs, from their folders: frames, statistics, figures and a page.

The imports of torch and pandas take seconds, so they happen only if the folders have runs.
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
        folder: a folder, or several folders of the same experiment.
        out: the folder of the report; None: `report` in the (first) folder.

    Raises:
        ConfigError: a folder has no runs, no run has a result, or the folders belong to different
            experiments.
        DataError: an experiment.json, or the files.json of an earlier report, is damaged.
        WriteError: a file cannot be written, is a link, or was not written by an earlier report.
    """
    for each in [folder] if isinstance(folder, str | Path) else folder:
        run_folders(Path(each))
    from fedhet.study.report.page import write_report

    return write_report(folder, out)


def main(argv: Sequence[str]) -> int:
    """Write the report of an experiment, or of any folder with runs. Print its summary and path."""
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
        "--out",
        type=Path,
        metavar="DIR",
        help="folder of the report; default: report/ in the first folder",
    )
    args = parser.parse_args(argv)
    written = write(args.folders, args.out)
    for sentence in written.sentences:
        print(clean(sentence))
    print(f"report: {written.page}")
    return 0
