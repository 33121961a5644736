"""Runs an experiment: keeps finished runs and trials, and launches the missing ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from fedhet.core.check import counted
from fedhet.core.errors import uncreatable
from fedhet.runs.record.lock import Lock
from fedhet.study import cells, tuning
from fedhet.study.axes import Setting
from fedhet.study.cells import Cell
from fedhet.study.code import Code
from fedhet.study.definition import Experiment
from fedhet.study.executors import Executor, PlannedRun
from fedhet.study.findable import find_data
from fedhet.study.folder import ExperimentFolder
from fedhet.study.live import Watch


@dataclass(frozen=True)
class Outcome:
    """The outcome of an experiment.

    Attributes:
        cells: number of runs and trials in the requested part.
        missing: the unfinished runs and trials of this part, with the reason.
        others: number of runs and trials outside of this part.
        degraded: whether any of them has lost more replies than `replies.max_lost` allows.
    """

    cells: int
    missing: dict[Cell, str]
    others: int
    degraded: bool


class Progress:
    """Runs an experiment from its first trial to its last run.

    Args:
        experiment: the experiment.
        path: its folder, which is created if it does not exist.
        code: the code at the begin of the command, before the imports that runs need.
        executor: makes the runs and trials.
    """

    def __init__(self, experiment: Experiment, path: Path, code: Code, executor: Executor) -> None:
        self.experiment = experiment
        self.folder = ExperimentFolder(path, experiment, code)
        self._executor = executor
        self._launched = 0
        self._trials = cells.trials(experiment)
        self._tuned: list[dict[str, Any]] = []  # the entries of the trials' choices

    def __str__(self) -> str:
        asked = cells.wanted(self.experiment, [*self._trials, *cells.runs(self.experiment)])
        trials = sum(cell.kind == "trial" for cell in asked)
        runs = counted(len(asked) - trials, "run")
        if not trials:
            return runs
        return f"{runs} and {counted(trials, 'trial')} ({trials / len(asked):.0%} of all)"

    def run(self) -> Outcome:
        """Run the missing trials, and then the missing runs with the settings that trials choose.

        A failed run or trial does not stop the others. If all trials that would choose the settings
        of a run have failed, the run is not launched.

        Raises:
            ConfigError: settings are wrong, or the folder cannot be used; nothing was run.
            OtherCode: the code has changed since the start of the command; nothing more is run.
            DataError: data are missing; nothing was run.
        """
        experiment, path = self.experiment, self.folder.path
        if experiment.tuning:
            combinations = [cells.labels(c) for c in cells.settings_of(experiment)]
            tuning.check_budget(experiment.tuning, combinations)
        data = cells.check(cells.covering(experiment), self._executor.bases)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise uncreatable("hydra.sweep.dir", path, error) from error
        lock = Lock(path, "experiment")
        try:
            return self._run_all(data)
        finally:
            lock.release()

    def _run_all(self, data: Mapping[frozenset[str], DictConfig]) -> Outcome:
        """Run the missing runs and trials. The folder of the experiment must be locked.

        Args:
            data: `cells.data_lines` of a cell -> the settings of a cell that reads these data.
        """
        self.folder.refuse_other()
        # Choices by trials of an earlier command stay recorded until new trials change them.
        runs, _ = self._runs()
        every = cells.wanted(self.experiment, [*self._trials, *runs])
        missing = self.folder.missing(every)  # before anything is written
        if self._executor.reads_here:
            lines = dict.fromkeys(map(cells.data_lines, missing))
            find_data(data[each] for each in lines if each in data)
        self.folder.discard(missing)
        self.folder.write([*self._trials, *runs], self._tuned)
        with Watch(len(every), len(every) - len(missing)) as watch:
            self._launch(cells.wanted(self.experiment, self._trials), watch)
            runs, lost = self._runs()
            self.folder.write([*self._trials, *runs], self._tuned)
            asked = cells.wanted(self.experiment, runs)
            self._launch([cell for cell in asked if cell not in lost], watch)
        every = [*self._trials, *runs]
        asked = cells.wanted(self.experiment, every)
        reasons = self.folder.missing_reasons(asked)
        why = "its settings cannot be chosen, because no trial for them has succeeded"
        reasons |= {cell: why for cell in asked if cell in lost}
        degraded = self.folder.is_degraded(every)
        return Outcome(len(asked), reasons, len(every) - len(asked), degraded)

    def _runs(self) -> tuple[list[Cell], set[Cell]]:
        """Return all runs with their chosen settings, and the runs without a choice."""
        tuning_ = self.experiment.tuning
        if tuning_ is None:
            return cells.runs(self.experiment), set()
        self._tuned = _choose(tuning_, self.folder, self._trials)
        chosen = {tuple(entry["axes"].items()): entry["chosen"] for entry in self._tuned}
        runs = cells.runs(self.experiment, chosen)
        return runs, {cell for cell in runs if chosen[cell.on(tuning_.per)] is None}

    def _launch(self, every: Sequence[Cell], watch: Watch) -> None:
        todo = self.folder.missing(every)
        self.folder.prepare(todo)
        any_code = self.experiment.on_other_code == "keep"
        runs = [
            PlannedRun(
                number,
                cell.label,
                cell.overrides,
                self.folder.path / cell.folder,
                any_code=any_code,
                trial=cell.kind == "trial",
            )
            for number, cell in enumerate(todo, self._launched)
        ]
        self._launched += len(runs)
        self._executor.launch(runs, watch)
        self.folder.refuse_change(todo)


def _choose(
    tuned: tuning.Tuning, folder: ExperimentFolder, trials: Sequence[Cell]
) -> list[dict[str, Any]]:
    """Return the entries `tuned` of experiment.json: choices of the trials, or of the file."""

    def entry(
        place: Setting, chosen: tuning.Point | None, validation: float | None, tried: int
    ) -> dict[str, Any]:
        space = tuned.space_of([label for _, label in place])
        return {
            "axes": dict(place),
            "chosen": chosen,
            "validation": validation,
            "trials": tried,
            "at_the_edge": tuning.at_the_edge(chosen, space) if chosen else [],
        }

    if tuned.chosen is not None:
        return [entry(place, chosen, None, 0) for place, chosen in tuned.chosen.items()]
    by_place: dict[Setting, list[Cell]] = {}
    for cell in trials:
        by_place.setdefault(cell.on(tuned.per), []).append(cell)
    entries = []
    for place, tried in by_place.items():
        points = {json.dumps(cell.tuned): cell.tuned for cell in tried}
        scores = {
            text: [folder.validation(cell) for cell in tried if cell.tuned == point]
            for text, point in points.items()
        }
        chosen, validation = tuning.best(scores) or ("", None)
        entries.append(entry(place, points.get(chosen), validation, len(points)))
    return entries
