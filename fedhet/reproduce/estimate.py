"""How long a reproduction takes on this machine, from a few rounds of each method."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from fedhet.config import composition
from fedhet.config.lines import by_key
from fedhet.experiment import cells
from fedhet.experiment.axes import SEED
from fedhet.experiment.cells import Cell
from fedhet.experiment.definition import Experiment

ROUNDS = 3
TRAIN = "train"


@dataclass(frozen=True)
class Cost:
    """Seconds of one run.

    Attributes:
        start: before the first round, and after the last one.
        phases: all rounds before the training, such as an exploration.
        step: one round of training.
        evaluation: one evaluation.
        rounds: how many rounds of training the run has.
        evaluations: how many evaluations.
    """

    start: float
    phases: float
    step: float
    evaluation: float
    rounds: int
    evaluations: int

    @property
    def total(self) -> float:
        """Seconds of the whole run."""
        return (
            self.start + self.phases + self.rounds * self.step + self.evaluations * self.evaluation
        )


@dataclass(frozen=True)
class Estimate:
    """How long an experiment takes.

    Attributes:
        measured: the name of a measured run -> its cost.
        runs: how many runs there are.
        trials: how many trials of the tuning.
        seconds: for all of them, one after another.
    """

    measured: dict[str, Cost]
    runs: int
    trials: int
    seconds: float


def estimate(experiment: Experiment) -> Estimate:
    """Measure a few rounds of each method in one setting, and of one method in each setting.

    The time of a method in another setting is taken to differ as that of the first method does.

    Raises:
        ConfigError: a setting is wrong.
        DataError: data are missing.
    """
    every = cells.wanted(experiment, cells.runs(experiment))
    axis = str(experiment.report["compare"])
    places = [_place(cell, axis) for cell in every]
    first_method, first_setting = places[0]
    wanted: dict[tuple[str, str], Cell] = {}
    for place, cell in zip(places, every, strict=True):
        if first_method == place[0] or first_setting == place[1]:
            wanted.setdefault(place, cell)
    costs = {place: measure(cell) for place, cell in wanted.items()}
    base = costs[places[0]].total

    def seconds(place: tuple[str, str]) -> float:
        method, setting = place
        known = costs.get(place)
        if known:
            return known.total
        return costs[method, first_setting].total * costs[first_method, setting].total / base

    tried = cells.wanted(experiment, cells.trials(experiment))
    trials = [_place(cell, axis) for cell in tried]
    return Estimate(
        {", ".join(filter(None, place)): cost for place, cost in costs.items()},
        len(places),
        len(trials),
        sum(map(seconds, [*places, *trials])),
    )


def _place(cell: Cell, axis: str) -> tuple[str, str]:
    """The method and the setting of a cell."""
    others = {k: v for k, v in cell.axes.items() if k not in (axis, SEED)}
    return str(cell.axes[axis]), ", ".join(f"{k}={v}" for k, v in others.items())


def measure(cell: Cell) -> Cost:
    """Run a few rounds of a cell in a folder of its own, and take their times."""
    from fedhet.job import run_job

    whole = composition.compose(cell.overrides).cfg
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        rounds = f"rounds={min(ROUNDS, whole.rounds)}"
        short = by_key([*cell.overrides, rounds, "eval.every=1", f"hydra.run.dir={run_dir}"])
        settings = composition.compose(list(short.values()))
        said = io.StringIO()  # the rounds, which are not the answer here
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            run_job(settings)
        text = (run_dir / "rounds.jsonl").read_text(encoding="utf-8")
        total = json.loads((run_dir / "summary.json").read_text())["seconds"]["total"]
    steps = [json.loads(line) for line in text.splitlines()]
    spent = [sum(step["seconds"].values()) for step in steps]
    training = [s for s in steps if s["phase"] == TRAIN]
    later = training[1:] or training  # the first round warms up
    evaluation = mean(step["seconds"]["evaluate"] for step in later)
    own = mean(sum(s["seconds"].values()) - s["seconds"]["evaluate"] for s in later)
    return Cost(
        start=max(0.0, total - sum(spent)),
        phases=sum(s for s, step in zip(spent, steps, strict=True) if step["phase"] != TRAIN),
        step=own,
        evaluation=evaluation,
        rounds=int(whole.rounds),
        evaluations=-(-int(whole.rounds) // int(whole.eval.every)),
    )


def in_words(seconds: float) -> str:
    """A duration as people say it."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"
