"""Estimate the time of an experiment on this machine from a few rounds of each method."""

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
        before: the start, all rounds before the training (such as an exploration), and the end.
        step: one round of training.
        evaluation: one evaluation.
        rounds: number of training rounds in the run.
        evaluations: number of evaluations in the run.
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
    """The estimated time of an experiment.

    Attributes:
        measured: the name of a measured run -> its cost.
        runs: number of runs.
        trials: number of trials of the tuning.
        seconds: seconds of all runs and trials, one after another.
        longest: seconds of the longest run or trial.
        tuning: seconds of all trials, one after another.
    """

    measured: dict[str, Cost]
    runs: int
    trials: int
    seconds: float
    longest: float
    tuning: float

    def rows(self) -> list[tuple[str, str]]:
        """Return the name and the cost of each measured run, for people."""
        return [
            (
                name,
                f"{in_words(cost.total)}: {cost.rounds} rounds of {cost.step:.3g} s,"
                f" {cost.evaluations} evaluations of {cost.evaluation:.3g} s,"
                f" {cost.before:.3g} s before and after",
            )
            for name, cost in self.measured.items()
        ]

    def __str__(self) -> str:
        runs, whole = counted(self.runs, "run"), in_words(self.seconds)
        if not self.trials:
            return f"{runs}, one after another: {whole}"
        return (
            f"{runs} and {counted(self.trials, 'trial')}, one after another: {whole};"
            f" the trials take {self.tuning / self.seconds:.0%}"
        )

    def side_by_side(self, processes: int) -> str:
        """Return a sentence on the time with this many processes at once."""
        least = max(self.seconds / processes, self.longest)
        return (
            f"{counted(processes, 'process', 'processes')} at once: about {in_words(least)};"
            " less if runs train in one batch (engine.fused=auto), because each run was measured"
            " alone"
        )


def estimate(experiment: Experiment) -> Estimate:
    """Measure a few rounds of each method in one setting, and of one method in each setting.

    The estimate assumes that a setting changes the time of all methods by the same factor.

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
    """Return the method and the setting of a run or trial."""
    others = {k: v for k, v in cell.axes.items() if k not in (axis, SEED)}
    return str(cell.axes.get(axis, "")), ", ".join(f"{k}={v}" for k, v in others.items())


def measure(cell: Cell) -> Cost:
    """Run a few rounds of a run or trial in a temporary folder, and measure their times."""
    from fedhet.engines.dispatch import run_job

    whole = composition.compose(cell.overrides).cfg
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        rounds = f"rounds={min(ROUNDS, whole.rounds)}"
        short = by_key([*cell.overrides, rounds, "eval.every=1", f"hydra.run.dir={run_dir}"])
        settings = composition.compose(list(short.values()))
        said = io.StringIO()  # the lines of the rounds, which the user need not see
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
    """Format a duration for people."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.{int(seconds < 10)}f} seconds"
