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
from fedhet.experiment.definition import Experiment
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
        cells: the number of its runs and trials.
        missing: the cells that are not there, with the reason.
        degraded: whether a cell has lost more replies than it was allowed.
    """

    folder: Path
    cells: int
    missing: dict[Cell, str]
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
        _run(folder, trials, launch)
        tuned = _choose(experiment, folder, trials)
        chosen = {tuple(entry["axes"].items()): entry["chosen"] for entry in tuned}
        runs = cells.runs(experiment, chosen)
        every = [*trials, *runs]
        folder.write(every, tuned)
        ready = [c for c in runs if not trials or chosen[c.setting] is not None]
        _run(folder, ready, launch)
        missing = folder.missing_reasons(every)
        lost = "none of the trials that would choose its settings has ended well"
        missing |= {cell: lost for cell in runs if cell not in ready}
        return Outcome(folder.path, len(every), missing, folder.is_degraded(every))
    finally:
        lock.release()


def _run(folder: ExperimentFolder, every: Sequence[Cell], launch: Launch) -> None:
    todo = folder.missing(every)
    if todo:
        folder.prepare(todo)
        launch(todo, len(every) - len(todo))


def _choose(
    experiment: Experiment, folder: ExperimentFolder, trials: Sequence[Cell]
) -> list[dict[str, Any]]:
    """The entries `tuned` of experiment.json: what each setting's trials have chosen."""
    if experiment.tuning is None:
        return []
    by_setting: dict[Setting, list[Cell]] = {}
    for cell in trials:
        by_setting.setdefault(cell.setting, []).append(cell)
    entries = []
    for setting, tried in by_setting.items():
        space = experiment.tuning.space_of([label for _, label in setting])
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
                "axes": dict(setting),
                "chosen": chosen,
                "validation": found and found[1],
                "trials": len(points),
                "at_the_edge": tuning.at_the_edge(chosen, space) if chosen else [],
            }
        )
    return entries
