"""An experiment from its first cell to its last: what is there is kept, what is missing is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedhet.errors import uncreatable
from fedhet.experiment import cells, tuning
from fedhet.experiment.cells import Cell, Setting
from fedhet.experiment.code import Code
from fedhet.experiment.definition import SEED, Experiment
from fedhet.experiment.folder import ExperimentFolder
from fedhet.record.lock import Lock

# Runs a batch of cells, in whatever order, and returns when none of them runs any more. It is told
# how many others of the same kind were there before.
Launch = Callable[[Sequence[Cell], int], None]


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
    experiment: Experiment, path: Path, launch: Launch, started: Callable[[Path], None]
) -> Outcome:
    """Run the cells of an experiment that are not there yet.

    Trials come first; the settings that they choose are those of the runs. A cell that fails does
    not end the others, and the runs of a setting without a successful trial are not launched.

    Args:
        experiment: the experiment.
        path: its folder, which is created if it does not exist.
        launch: runs cells.
        started: is told the folder as soon as the experiment is recorded in it.

    Raises:
        ConfigError: a cell's settings are wrong, or the folder cannot be used; nothing was run.
    """
    trials = cells.trials(experiment)
    if experiment.tuning:
        combinations = [cells.labels(c) for c in cells.settings_of(experiment)]
        tuning.check_budget(experiment.tuning, combinations)
    cells.check(list(cells.covering(experiment)))
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise uncreatable("hydra.sweep.dir", path, error) from error
    lock = Lock(path)
    try:
        folder = ExperimentFolder(path, experiment, Code.current())
        folder.write([*trials, *cells.runs(experiment)], [])
        started(folder.path)
        _run(folder, [cell for cell in trials if _wanted(experiment, cell)], launch)
        tuned = _choose(experiment, folder, trials)
        chosen = {tuple(entry["axes"].items()): entry["chosen"] for entry in tuned}
        runs = cells.runs(experiment, chosen)
        every = [*trials, *runs]
        folder.write(every, tuned)
        wanted = [cell for cell in runs if _wanted(experiment, cell)]
        per = experiment.tuning.per if experiment.tuning else ()
        ready = [c for c in wanted if not trials or chosen[c.on(per)] is not None]
        _run(folder, ready, launch)
        asked = [cell for cell in every if _wanted(experiment, cell)]
        missing = folder.missing_reasons(asked)
        lost = "none of the trials that would choose its settings has ended well"
        missing |= {cell: lost for cell in wanted if cell not in ready}
        others = len(every) - len(asked)
        return Outcome(folder.path, len(asked), missing, others, folder.is_degraded(every))
    finally:
        lock.release()


def _wanted(experiment: Experiment, cell: Cell) -> bool:
    """Whether the cell is in the part that is run now; trials have seeds of their own."""
    axes = {axis: label for axis, label in cell.axes.items() if axis != SEED}
    return experiment.wants(cell.axes if cell.kind == "run" else axes)


def _run(folder: ExperimentFolder, every: Sequence[Cell], launch: Launch) -> None:
    todo = folder.missing(every)
    if todo:
        folder.prepare(todo)
        launch(todo, len(every) - len(todo))


def _choose(
    experiment: Experiment, folder: ExperimentFolder, trials: Sequence[Cell]
) -> list[dict[str, Any]]:
    """The entries `tuned` of experiment.json: what the trials have chosen."""
    if experiment.tuning is None:
        return []
    by_place: dict[Setting, list[Cell]] = {}
    for cell in trials:
        by_place.setdefault(cell.on(experiment.tuning.per), []).append(cell)
    entries = []
    for place, tried in by_place.items():
        space = experiment.tuning.space_of(list(tried[0].axes.values()))
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
