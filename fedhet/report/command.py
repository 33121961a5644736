"""`python -m fedhet report`: the report of an experiment, or of any folder with runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fedhet import report
from fedhet.core.errors import clean


def main(argv: Sequence[str]) -> int:
    """Write the report, print its summary and where it is, and return 0."""
    parser = argparse.ArgumentParser(prog="python -m fedhet report", description=__doc__)
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
    written = report.write(args.folders, args.out)
    for sentence in written.sentences:
        print(clean(sentence))
    print(f"report: {written.page}")
    return 0
