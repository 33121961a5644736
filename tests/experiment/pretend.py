"""The experiment `mine` without training: its cells are recorded as if they had been run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from fedhet import __main__ as main
from fedhet.core.errors import RunFailed, has_diverged
from fedhet.data.storage import write_json
from fedhet.runs.config.composition import Launching
from fedhet.runs.record.schema import FORMAT
from fedhet.study import launch, progress, report
from fedhet.study.cells import Cell
from fedhet.study.executors import Executor, PlannedRun
from fedhet.study.folder import EXPERIMENT, recorded
from fedhet.study.live import Watch
from fedhet.study.progress import Progress

DIVERGED = "client 1: weights, tensor 'a': holds NaN or infinite values"
Rows = list[dict[str, Any]]


class Pretend(Executor):
    """The command line, but for the training and the report's page.

    Attributes:
        folder: the experiment's folder.
        launched: the labels of the cells that the last command has launched, in their order.
        sought: the data that it has looked for.
        find: looks for them.
        report: writes the report.
        fails: the reason for which a cell fails, or None; it may raise what it likes.
        about: what the summary of a cell has in addition.
        rows: the lines of its rounds.jsonl.
    """

    reads_here = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.launched: list[str] = []
        self.sought: list[DictConfig] = []
        self.report: Callable[[Path], Any] = lambda folder: report.Written(
            folder / "report" / "index.html", []
        )
        self.find: Callable[[Sequence[DictConfig]], None] = lambda sources: None
        self.fails: Callable[[Cell], str | None] = lambda cell: None
        self.about: Callable[[Cell], dict[str, Any]] = lambda cell: {}
        self.rows: Callable[[Cell], Rows] = lambda cell: [{"acc_val_weighted": 0.5}]

    def run(self, *lines: str) -> int:
        """Run the experiment with these overrides, and return the exit code."""
        self.launched, self.sought = [], []
        with pytest.MonkeyPatch.context() as patch:
            launching = Launching("basic", {}, self.folder)
            patch.setattr(launch.composition, "launching", lambda lines: launching)
            patch.setattr(launch, "executor", lambda launching: self)
            patch.setattr(Progress, "_launch", self._cells(Progress._launch))
            patch.setattr(report, "write", self.report)
            patch.setattr(progress, "find_data", self._find_data)
            return main.main(["experiment=mine", *lines])

    def record(self) -> dict[str, Any]:
        """The content of experiment.json."""
        content: dict[str, Any] = json.loads((self.folder / EXPERIMENT).read_text())
        return content

    def written(self) -> dict[str, int]:
        """The cells that are there, each with the time of its summary in ns."""
        files = sorted(self.folder.glob("cells/*/summary.json"))
        return {file.parent.name: file.stat().st_mtime_ns for file in files}

    def _find_data(self, sources: Iterable[DictConfig]) -> None:
        found = [*sources]
        self.sought.extend(found)
        self.find(found)

    def _cells(self, launch: Callable[..., None]) -> Callable[..., None]:
        """Take notice of the cells that an experiment launches."""

        def noted(progress: Progress, every: Sequence[Cell], watch: Watch) -> None:
            self._known = {self.folder / cell.folder: cell for cell in every}
            launch(progress, every, watch)

        return noted

    def launch(self, runs: Sequence[PlannedRun], watch: Watch) -> dict[PlannedRun, str]:
        for run in runs:
            self.launched.append(run.label)
            folder, cell = run.folder, self._known[run.folder]
            with suppress(RunFailed), recorded(folder, any_code=False):
                reason = self.fails(cell)
                if reason is None or has_diverged(reason):
                    rows = "".join(f"{json.dumps(row)}\n" for row in self.rows(cell))
                    (folder / "rounds.jsonl").write_text(rows)
                    status = "failed" if reason else "ok"
                    about = {"format": FORMAT, "status": status, **self.about(cell)}
                    write_json(folder / "summary.json", about)
                if reason is not None:
                    raise RunFailed(reason)
        return {}
