"""How long an experiment takes on this machine, from a few rounds of each method."""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path
from typing import NamedTuple

from fedhet.core.check import counted
from fedhet.runs.config import composition
from fedhet.runs.config.experiment_file import SEED
from fedhet.runs.config.lines import by_key
from fedhet.runs.record.outcome import load_run
from fedhet.study import cells
from fedhet.study.cells import Cell
from fedhet.study.definition import Experiment

ROUNDS = 3
TRAIN = "train"


class Cost(NamedTuple):
    """Seconds of one run.

    Attributes:
        before: the start, all rounds before the training, such as an exploration, and the end.
        step: one round of training.
        evaluation: one evaluation.
        rounds: how many rounds of training the run has.
        evaluations: how many evaluations.
    """

    before: float
    step: float
    evaluation: float
    rounds: int
    evaluations: int

    @property
    def total(self) -> float:
        """Seconds of the whole run."""
        return self.before + self.rounds * self.step + self.evaluations * self.evaluation


class Estimate(NamedTuple):
    """How long an experiment takes.

    Attributes:
        measured: the name of a measured run -> its cost.
        runs: how many runs there are.
        trials: how many trials of the tuning.
        seconds: for all of them, one after another.
        longest: of one of them.
        tuning: for the trials.
    """

    measured: dict[str, Cost]
    runs: int
    trials: int
    seconds: float
    longest: float
    tuning: float

    def rows(self) -> list[tuple[str, str]]:
        """Each measured run and what it costs, for people."""
        return [
            (
                name,
                f"{in_words(cost.total)}: {cost.rounds} rounds of {cost.step:.3g} s,"
                f" {cost.evaluations} evaluations of {cost.evaluation:.3g} s,"
                f" {cost.before:.3g} s before them",
            )
            for name, cost in self.measured.items()
        ]

    def __str__(self) -> str:
        runs, whole = counted(self.runs, "run"), in_words(self.seconds)
        if not self.trials:
            return f"{runs}, one after another: {whole}"
        return (
            f"{runs} and {counted(self.trials, 'trial')}, one after another: {whole},"
            f" of which the trials take {self.tuning / self.seconds:.0%}"
        )

    def side_by_side(self, processes: int) -> str:
        """What is known of the time that so many processes take."""
        least = max(self.seconds / processes, self.longest)
        return (
            f"{counted(processes, 'process', 'processes')} at once: about {in_words(least)};"
            " an upper bound where runs train as one (engine.fused=auto), because each was measured"
            " by itself"
        )


def estimate(experiment: Experiment) -> Estimate:
    """Measure a few rounds of each method in one setting, and of one method in each setting.

    The time of a method in another setting is taken to differ as that of the first method does.

    Raises:
        ConfigError: a setting is wrong.
        DataError: data are missing.
    """
    axis = str(experiment.report.get("compare") or next(iter(experiment.axes)))
    runs = cells.wanted(experiment, cells.runs(experiment))
    trials = cells.wanted(experiment, cells.trials(experiment))
    places = [_place(cell, axis) for cell in runs]
    method, setting = places[0]
    measured: dict[tuple[str, str], Cost] = {}
    for place, cell in zip(places, runs, strict=True):
        if place not in measured and (place[0] == method or place[1] == setting):
            measured[place] = measure(cell)
    seconds = {place: cost.total for place, cost in measured.items()}

    def total(place: tuple[str, str]) -> float:
        by_setting = seconds[method, place[1]] / seconds[method, setting]
        return seconds.get(place, seconds[place[0], setting] * by_setting)

    of_trials = [total(_place(cell, axis)) for cell in trials]
    every = [*map(total, places), *of_trials]
    return Estimate(
        {", ".join(filter(None, place)): cost for place, cost in measured.items()},
        len(runs),
        len(trials),
        sum(every),
        max(every),
        sum(of_trials),
    )


def _place(cell: Cell, axis: str) -> tuple[str, str]:
    """The method and the setting of a cell."""
    others = {k: v for k, v in cell.axes.items() if k not in (axis, SEED)}
    return str(cell.axes.get(axis, "")), ", ".join(f"{k}={v}" for k, v in others.items())


def measure(cell: Cell) -> Cost:
    """Run a few rounds of a cell in a folder of its own, and take their times."""
    from fedhet.engines.dispatch import run_job

    whole = composition.compose(cell.overrides).cfg
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        rounds = f"rounds={min(ROUNDS, whole.rounds)}"
        short = by_key([*cell.overrides, rounds, "eval.every=1", f"hydra.run.dir={run_dir}"])
        settings = composition.compose(list(short.values()))
        said = io.StringIO()  # the rounds, which are not the answer here
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            run_job(settings)
        run = load_run(run_dir)
        steps = run.rounds
    spent = steps.filter(like="seconds.").sum(axis=1)
    train = steps["phase"] == TRAIN
    later = train & (train.cumsum() > 1) if train.sum() > 1 else train  # the first one warms up
    evaluation = steps.loc[later, "seconds.evaluate"].mean()
    return Cost(
        before=max(0.0, run.summary["seconds"]["total"] - spent[train].sum()),
        step=spent[later].mean() - evaluation,
        evaluation=evaluation,
        rounds=int(whole.rounds),
        evaluations=-(-int(whole.rounds) // int(whole.eval.every)),
    )


def in_words(seconds: float) -> str:
    """A duration as people say it."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.{int(seconds < 10)}f} seconds"
