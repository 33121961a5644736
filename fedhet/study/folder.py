"""The folder of an experiment: the state of its cells (runs and trials), and experiment.json.

experiment.json   the axes, the tuning, and every run and trial
cells/<name>/     the run folder of a run or trial; it contains also:
  cell.json       its state (waiting, running, finished or failed) and the code of its process
  log.txt         the output of its process, if it ran in another process
report/           the report
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from fedhet.core.errors import ConfigError, DataError, OtherCode, has_diverged, reason_of
from fedhet.data.forms import read_object
from fedhet.data.storage import write_json
from fedhet.runs.config import composition
from fedhet.runs.config.composition import Config
from fedhet.runs.config.lines import key_of, value_of
from fedhet.runs.record.schema import CELL_FILE, FORMAT, READABLE, read_steps
from fedhet.runs.record.scores import validation_score
from fedhet.study import code as code_files
from fedhet.study.cells import Cell
from fedhet.study.code import Code
from fedhet.study.definition import Experiment

EXPERIMENT = "experiment.json"
WAITING, RUNNING, FINISHED, FAILED = "waiting", "running", "finished", "failed"
POOLED = "partition.pool_test"
TEST_KNOWN = (
    "Each seed draws the clients' own test parts anew. Some of their samples were therefore"
    " training or validation data of the trials. The choice saw no test score."
)
CHOOSE = (
    "Use on_other_code=keep to keep the runs of other code, on_other_code=rerun to repeat them,"
    " or hydra.sweep.dir=<folder> for another folder"
)
REASONS = {
    None: "it has not been run",
    WAITING: "it has not been run",
    RUNNING: "it was interrupted: its process ended without an error message",
}


class ExperimentFolder:
    """The folder of an experiment that is being run.

    Args:
        path: the folder.
        experiment: the experiment.
        code: the code that runs it.
    """

    def __init__(self, path: Path, experiment: Experiment, code: Code) -> None:
        self.path = path.resolve()
        self._experiment = experiment
        self._code = code

    def refuse_other(self) -> None:
        """Refuse a folder that holds another experiment.

        Raises:
            ConfigError: the folder holds another experiment.
        """
        before = _read(self.path / EXPERIMENT)
        if before and before.get("experiment") != self._experiment.name:
            raise ConfigError(
                f"hydra.sweep.dir={self.path}: the folder holds the experiment"
                f" {before.get('experiment')}; name another one for {self._experiment.name}"
            )

    def missing(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return the cells that still need to run.

        `on_other_code` decides whether cells that other code has finished count as finished.

        Raises:
            ConfigError: other code has finished some cells, and `on_other_code` is "stop".
        """
        states = {cell: state_of(self.path / cell.folder) for cell in cells}
        finished = [cell for cell in cells if states[cell].get("status") == FINISHED]
        other = [
            c for c in finished if states[c].get("code", {}).get("digest") != self._code.digest
        ]
        if other and self._experiment.on_other_code == "stop":
            theirs = states[other[0]].get("code", {})
            raise ConfigError(
                f"{self.path}: {len(other)} of the {len(cells)} runs were made by other code"
                f" ({Code.text(theirs)}; now {Code.text(self._code.record())}). {CHOOSE}"
            )
        kept = self._experiment.on_other_code == "keep"
        return [c for c in cells if c not in finished or (c in other and not kept)]

    def discard(self, cells: Sequence[Cell]) -> None:
        """Remove the folders of finished cells that will run again (made by other code)."""
        for cell in cells:
            if state_of(self.path / cell.folder).get("status") == FINISHED:
                shutil.rmtree(self.path / cell.folder)

    def prepare(self, cells: Sequence[Cell]) -> None:
        """Empty the folders of cells that will be launched, unless the cell can resume.

        A cell resumes from its checkpoint only if the same code has begun it.
        """
        for cell in cells:
            folder = self.path / cell.folder
            same_code = self._code.is_that_of(state_of(folder).get("code", {}))
            if not same_code or not any((folder / "checkpoints").glob("*/manifest.json")):
                shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
            _write_cell(folder, WAITING, self._code.record())

    def refuse_change(self, cells: Sequence[Cell]) -> None:
        """Check that the code has not changed since the command began.

        Args:
            cells: the cells that were to run since then.

        Raises:
            OtherCode: the code has changed, `on_other_code` is not "keep", and some of the cells
                did not run, or did not run with the experiment's code only.
        """
        now = Code.current()
        if self._experiment.on_other_code == "keep" or now.digest == self._code.digest:
            return
        states = [state_of(self.path / cell.folder) for cell in cells]
        whole = [
            self._code.is_that_of(state.get("code", {}))
            for state in states
            if state.get("status") == FINISHED
        ]
        if left := len(cells) - sum(whole):
            raise OtherCode(
                f"{self.path}: the code has changed while the experiment ran"
                f" ({Code.text(self._code.record())}; now {Code.text(now.record())}), and the first"
                f" code alone has not finished {left} of the last {len(cells)} runs. {CHOOSE}"
            )

    def missing_reasons(self, cells: Sequence[Cell]) -> dict[Cell, str]:
        """Return the cells that have not finished, each with the reason."""
        states = {cell: state_of(self.path / cell.folder) for cell in cells}
        return {
            cell: state.get("reason") or REASONS.get(state.get("status"), "its record is damaged")
            for cell, state in states.items()
            if state.get("status") != FINISHED
        }

    def validation(self, cell: Cell) -> float | None:
        """Return the validation score of a cell, of the kind that `report.metric` names.

        Returns:
            The score at the last evaluation, the best score, or the mean of the last scores; None
            if the cell has not finished, has diverged, or has no such score.
        """
        if self.missing_reasons([cell]):
            return None
        folder = self.path / cell.folder
        summary = _read(folder / "summary.json")
        if summary["status"] != "ok":  # the run has diverged
            return None
        try:
            rows = list(read_steps(folder / "rounds.jsonl"))
        except DataError as error:
            raise DataError(f"{error}; remove {folder} to run it again") from error
        return validation_score(summary, rows, self._experiment.report["metric"])

    def is_degraded(self, cells: Sequence[Cell]) -> bool:
        """Whether any of the cells has lost more replies than `replies.max_lost` allows."""
        folders = (self.path / cell.folder for cell in cells)
        return any(_read(folder / "summary.json").get("degraded") for folder in folders)

    def _notes(self, cells: Sequence[Cell]) -> list[str]:
        """Return the report's notes, and a note if trials may have trained on test samples."""
        report = self._experiment.report
        lines = {line for cell in cells for line in cell.overrides if key_of(line) == POOLED}
        of_file = composition.raw(self._experiment.fixed[:1]).partition.get("pool_test")
        pooled = of_file or any(yaml.safe_load(value_of(line)) is True for line in lines)
        on_clients = report["metric"] not in ("last", "best_val", "last_k")
        known = self._experiment.tuning and (pooled or on_clients)
        return [*report["notes"], *([TEST_KNOWN] if known else [])]

    def write(self, cells: Sequence[Cell], tuned: Sequence[dict[str, Any]]) -> None:
        """Write experiment.json.

        Args:
            cells: all cells that are known by now.
            tuned: the entries of the trials' choices.
        """
        experiment = self._experiment
        content = {
            "format": FORMAT,
            "experiment": experiment.name,
            "title": experiment.title,
            "command": list(experiment.command),
            "fixed": list(experiment.fixed),
            "digest": experiment.digest,
            "axes": experiment.labels,
            "tune": experiment.tuning.record() if experiment.tuning else None,
            "report": {**experiment.report, "notes": self._notes(cells)},
            "tuned": list(tuned),
            "cells": [cell.record() for cell in cells],
            "code": self._code.record(),
        }
        write_json(self.path / EXPERIMENT, content)


def count(path: Path) -> tuple[int, int]:
    """Return how many cells of an experiment have finished, and how many it has."""
    cells = _read(path / EXPERIMENT).get("cells", [])
    states = [state_of(path / cell["folder"]).get("status") for cell in cells]
    return states.count(FINISHED), len(cells)


def state_of(folder: Path) -> dict[str, Any]:
    """Read cell.json; a finished cell has the status "damaged" if its record is incomplete."""
    try:
        state = _read(folder / CELL_FILE)
        whole = isinstance(state.get("code", {}), dict)
        if state.get("status") == FINISHED:
            summary = _read(folder / "summary.json")
            whole &= summary.get("format") in READABLE and "status" in summary
            whole &= (folder / "rounds.jsonl").exists()
    except DataError:
        whole = False
    return state if whole else {"status": "damaged"}


# ---- in the process of a cell
def as_cell(settings: Config, folder: Path) -> Config:
    """Return the settings of a cell; it resumes if its run has begun."""
    begun = (folder / "rounds.jsonl").exists()  # the last file that a run writes at its start
    if not begun:
        (folder / "summary.json").unlink(missing_ok=True)
    return replace(settings, run_dir_given=True, resumes=begun)


@contextmanager
def recorded(folder: Path, *, any_code: bool) -> Iterator[None]:
    """Update cell.json while the block runs the cell.

    Args:
        folder: the cell's folder; its cell.json has the experiment's code.
        any_code: whether the cell may run with other code.

    Raises:
        OtherCode: this machine has other code than the experiment (the files have changed, or
            another machine has other files), and `any_code` is false.
    """
    code = _read(folder / CELL_FILE).get("code", {})
    found = code_files.joined(code, code_files.digest())
    if found != code and not any_code:
        reason = f"its process has found other code ({Code.text(code)}; now {Code.text(found)})"
        _write_cell(folder, WAITING, code, reason)
        raise OtherCode(reason)

    def ends(status: str, reason: str | None = None) -> None:
        _write_cell(folder, status, code_files.joined(found, code_files.digest()), reason)

    _write_cell(folder, RUNNING, found)
    try:
        yield
    except Exception as error:
        reason = reason_of(error)
        # Divergence is a result: the same run would diverge again.
        ends(FINISHED if has_diverged(reason) else FAILED, reason)
        raise
    except BaseException:
        ends(WAITING, "it was interrupted")
        raise
    ends(FINISHED)


def record_failure(folder: Path, reason: str) -> None:
    """Write to cell.json why a run has failed, if its own process could not.

    A run of a plain sweep gets a cell.json, too, but without the code.

    Args:
        folder: the run folder.
        reason: why the run has failed.

    Raises:
        DataError: cell.json is damaged.
        WriteError: cell.json cannot be written.
    """
    known = _read(folder / CELL_FILE)
    if known.get("status") not in (FAILED, FINISHED):
        content = {"format": FORMAT, **known, "status": FAILED, "reason": reason}
        write_json(folder / CELL_FILE, content)


def _write_cell(folder: Path, status: str, code: Any, reason: str | None = None) -> None:
    content = {"format": FORMAT, "status": status, "reason": reason, "code": code}
    write_json(folder / CELL_FILE, content)


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file of fedhet; empty if there is no such file.

    Raises:
        DataError: the file is damaged.
    """
    try:
        return read_object(path)
    except FileNotFoundError:
        return {}
