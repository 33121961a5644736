"""What one or many runs say, read from their folders: frames, statistics, figures and a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedhet.report.found import Written, run_folders

__all__ = ["Written", "run_folders", "write"]


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
    from fedhet.report.page import write_report  # torch, pandas and matplotlib take seconds

    return write_report(folder, out)
