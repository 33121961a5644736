"""An experiment from its first cell to its last: what is there is kept, what is missing is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhet.core.errors import uncreatable
from fedhet.experiment import cells, tuning
from fedhet.experiment.cells import Cell, Setting
from fedhet.experiment.code import Code
from fedhet.experiment.definition import Experiment
from fedhet.experiment.folder import ExperimentFolder
from fedhet.record.lock import Lock

if TYPE_CHECKING:
    from fedhet.data.findable import Source

# Runs a batch of cells, in whatever order, and returns when none of them runs any more.
Launch = Callable[[Sequence[Cell]], None]
# Is told the folder as soon as the experiment is recorded in it, how many cells are wanted, and how
# many of them are there.
Started = Callable[[Path, int, int], None]
# Raises DataError if some of these data are missing where the cells will run.
Find = Callable[["Sequence[Source]"], None]


@dataclass(frozen=True)
class Outcome:
    """What has become of an experiment.

    Attributes:
        folder: its folder.
        cells: the number of its runs and trials, in the part that is run now.
        missing: those that are not there, with the reason.
        others: the number of its cells outside of that part.
        degraded: whether a cell has lost more replies than it was allowed.
    """

    folder: Path
    cells: int
    missing: dict[Cell, str]
    others: int
    degraded: bool


def run(
    experiment: Experiment,
    path: Path,
    code: Code,
    launch: Launch,
    started: Started,
    find_data: Find,
) -> Outcome:
    """Run the cells of an experiment that are not there yet.

    Trials come first; the settings that they choose are those of the runs. A cell that fails does
    not end the others, and the runs of a setting without a successful trial are not launched.

    Args:
        experiment: the experiment.
        path: its folder, which is created if it does not exist.
        code: the code with which the command began, before it imported what runs need.
        launch: runs cells.
        started: is told when the first cell is about to start.
        find_data: looks for the data of the cells that are missing, before any of them starts.

    Raises:
        ConfigError: a cell's settings are wrong, or the folder cannot be used; nothing was run.
        OtherCode: the code has changed meanwhile; no more was run.
        DataError: data are missing; nothing was run.
    """
    if experiment.tuning:
        combinations = [cells.labels(c) for c in cells.settings_of(experiment)]
        tuning.check_budget(experiment.tuning, combinations)
    data = cells.check(list(cells.covering(experiment)))

    def find(missing: Sequence[Cell]) -> None:
        if lines := dict.fromkeys(map(cells.data_lines, missing)):
            find_data([data[each] for each in lines if each in data])

    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise uncreatable("hydra.sweep.dir", path, error) from error
    lock = Lock(path, "experiment")
    try:
        return _Progress(experiment, path, code, launch).run(started, find)
    finally:
        lock.release()


class _Progress:
    """An experiment whose folder is locked."""

    def __init__(self, experiment: Experiment, path: Path, code: Code, launch: Launch) -> None:
        self._experiment = experiment
        self._folder = ExperimentFolder(path, experiment, code)
        self._launch = launch
        self._trials = cells.trials(experiment)

    def run(self, started: Started, find: Callable[[Sequence[Cell]], None]) -> Outcome:
        """Run what is missing, once `find` has found its data."""
        # What trials of an earlier command have chosen stays recorded until there is more.
        runs, _ = self._runs()
        every = cells.wanted(self._experiment, [*self._trials, *runs])
        missing = self._folder.missing(every)  # before anything is written
        find(missing)
        self._folder.discard(missing)
        self._record(runs)
        started(self._folder.path, len(every), len(every) - len(missing))
        self._run(cells.wanted(self._experiment, self._trials))
        runs, lost = self._runs()
        self._record(runs)
        self._run([cell for cell in cells.wanted(self._experiment, runs) if cell not in lost])
        every = [*self._trials, *runs]
        asked = cells.wanted(self._experiment, every)
        reasons = self._folder.missing_reasons(asked)
        why = "none of the trials that would choose its settings has ended well"
        reasons |= {cell: why for cell in asked if cell in lost}
        degraded = self._folder.is_degraded(every)
        return Outcome(self._folder.path, len(asked), reasons, len(every) - len(asked), degraded)

    def _runs(self) -> tuple[list[Cell], set[Cell]]:
        """The runs with the settings that the trials choose, and those for which none is chosen."""
        tuning_ = self._experiment.tuning
        if tuning_ is None:
            return cells.runs(self._experiment), set()
        self._tuned = _choose(tuning_, self._folder, self._trials)
        chosen = {tuple(entry["axes"].items()): entry["chosen"] for entry in self._tuned}
        runs = cells.runs(self._experiment, chosen)
        return runs, {cell for cell in runs if chosen[cell.on(tuning_.per)] is None}

    def _record(self, runs: Sequence[Cell]) -> None:
        tuned = self._tuned if self._experiment.tuning else []
        self._folder.write([*self._trials, *runs], tuned)

    def _run(self, every: Sequence[Cell]) -> None:
        todo = self._folder.missing(every)
        if todo:
            self._folder.prepare(todo)
            self._launch(todo)
            self._folder.refuse_change(todo)


def _choose(
    tuned: tuning.Tuning, folder: ExperimentFolder, trials: Sequence[Cell]
) -> list[dict[str, Any]]:
    """The entries `tuned` of experiment.json: what the trials have chosen."""
    by_place: dict[Setting, list[Cell]] = {}
    for cell in trials:
        by_place.setdefault(cell.on(tuned.per), []).append(cell)
    entries = []
    for place, tried in by_place.items():
        space = tuned.space_of(list(tried[0].axes.values()))
        points: list[tuning.Point] = []
        scores: dict[int, list[float | None]] = {}
        for cell in tried:
            if cell.tuned not in points:
                points.append(cell.tuned)
            scores.setdefault(points.index(cell.tuned), []).append(folder.validation(cell))
        found = tuning.best(scores)
        chosen = None if found is None else points[found[0]]
        entries.append(
            {
                "axes": dict(place),
                "chosen": chosen,
                "validation": found and found[1],
                "trials": len(points),
                "at_the_edge": tuning.at_the_edge(chosen, space) if chosen else [],
            }
        )
    return entries
