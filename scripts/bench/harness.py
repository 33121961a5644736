"""Runs systems in alternation, each time in a new process, and compares the results with goals.

A system is a script of this folder that prints one line of JSON. If it cannot run here, it exits
with code ABSENT and gives the reason on stderr; it is then skipped, and what it would have measured
is NaN. OMP_NUM_THREADS is 1 everywhere. This module imports nothing heavy.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LONGEST = 300  # of a line that shows figures
ABSENT = 3


def _joined(separator: str, *values: str | None) -> str:
    return separator.join(value for value in values if value)


# fedhet imports the classes of pieces.py by name, also in Ray's processes.
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": _joined(os.pathsep, str(HERE), os.environ.get("PYTHONPATH")),
    "FEDHET_TRUST": _joined(",", "pieces", os.environ.get("FEDHET_TRUST")),
}


@dataclass
class System:
    """What the repetitions of one system have printed.

    Attributes:
        reps: the JSON object of each repetition.
        absent: why the system cannot run here; None if it can.
    """

    reps: list[dict[str, Any]] = field(default_factory=list)
    absent: str | None = None

    def value(self, key: str) -> float:
        """The median over the repetitions."""
        return statistics.median([rep[key] for rep in self.reps] or [math.nan])

    @property
    def median(self) -> float:
        """Seconds per round: the median of the repetitions' medians."""
        rounds = [statistics.median(rep["rounds"]) for rep in self.reps if "rounds" in rep]
        return statistics.median(rounds or [math.nan])

    @property
    def best(self) -> float:
        """Seconds of the best single round."""
        return min(
            (second for rep in self.reps for second in rep.get("rounds", ())), default=math.nan
        )

    @property
    def times(self) -> dict[str, float]:
        """The median and the best round, of a system that has timed rounds."""
        return {} if math.isnan(self.median) else {"median": self.median, "best": self.best}


Systems = Mapping[str, System]


@dataclass(frozen=True)
class Goal:
    """A measured value, and its bound.

    Attributes:
        what: the value in words.
        measured: takes the value from the systems.
        bound: the largest value that meets the goal, or the smallest if `least`; None if the value
            is only shown.
        unit: the unit of both; "x" for a ratio.
        least: whether `bound` is a lower bound.
    """

    what: str
    measured: Callable[[Systems], float]
    bound: float | None = None
    unit: str = "x"
    least: bool = False

    def verdict(self, value: float) -> str:
        """ "met", "MISSED", "skipped" if there is no value, or "" if there is no bound."""
        if self.bound is None or math.isnan(value):
            return "" if self.bound is None else "skipped"
        return "met" if (value >= self.bound if self.least else value <= self.bound) else "MISSED"


@dataclass(frozen=True)
class Cell:
    """A part of the benchmark.

    Attributes:
        about: what it measures.
        systems: the names of the systems, and each one's script and arguments.
        goals: what is taken from them.
    """

    about: str
    systems: Mapping[str, Sequence[str]]
    goals: Sequence[Goal]

    def run(self, reps: int) -> dict[str, Any]:
        """Run it, print its rounds and goals, and return all as values that JSON can hold."""
        systems = alternate(self.systems, reps)
        _show(systems)
        goals = []
        for goal in self.goals:
            value = goal.measured(systems)
            verdict = goal.verdict(value)
            sign = ">=" if goal.least else "<="
            bound = "" if goal.bound is None else f"(goal {sign} {goal.bound:.3g} {goal.unit})  "
            print(f"  {verdict:8} {value:8.3g} {goal.unit:4} {bound}{goal.what}")
            known = {key: one for key, one in vars(goal).items() if key != "measured"}
            measured = None if math.isnan(value) else value
            goals.append({**known, "measured": measured, "verdict": verdict})
        printed = {name: {**vars(one), **one.times} for name, one in systems.items()}
        return {"goals": goals, "systems": printed}


def timed(
    pieces: Mapping[str, Callable[[], object]],
    reps: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each piece in each repetition, in alternation.

    The first call of each fills caches and is left out.
    """
    seconds: dict[str, list[float]] = {name: [] for name in pieces}
    for _ in range(reps + 1):
        for name, piece in pieces.items():
            began = clock()
            piece()
            seconds[name].append(clock() - began)
    return {name: times[1:] for name, times in seconds.items()}


def alternate(commands: Mapping[str, Sequence[str]], reps: int) -> dict[str, System]:
    """Run every system once, then every system again, so that slow minutes affect all of them."""
    systems = {name: System() for name in commands}
    for rep in range(reps):
        for name, (script, *arguments) in commands.items():
            if systems[name].absent is None:
                print(f"{rep + 1}/{reps} {name}", file=sys.stderr, flush=True)
                process = subprocess.run(
                    [sys.executable, str(HERE / script), *arguments],
                    env=ENVIRONMENT,
                    capture_output=True,
                    text=True,
                )
                if process.returncode == ABSENT:
                    systems[name].absent = process.stderr.strip().rpartition("\n")[2]
                elif process.returncode:
                    raise RuntimeError(
                        f"{script} {' '.join(arguments)} failed with exit code"
                        f" {process.returncode}:\n{process.stderr[-2000:]}"
                    )
                else:
                    last = process.stdout.strip().rpartition("\n")[2]
                    # At once, so that a later failure loses nothing.
                    print(f"    {last[:LONGEST]}", file=sys.stderr, flush=True)
                    systems[name].reps.append(json.loads(last))
    return systems


def answer(*questions: Callable[..., dict[str, Any]]) -> None:
    """Print what the function that the command line names returns; its words are the arguments."""
    name, *words = sys.argv[1:]
    chosen = {question.__name__: question for question in questions}[name]
    print(json.dumps(chosen(*(int(word) if word.isdigit() else word for word in words))))


def _show(systems: Systems, floor: str = "floor") -> None:
    """Print the systems' rounds, with ratios to the floor."""
    for name, system in systems.items():
        if system.absent:
            print(f"  {name:24} skipped: {system.absent}")
        elif system.times:
            line = (
                f"  {name:24} seconds per round: median {system.median:.4f}, best {system.best:.4f}"
            )
            if floor in systems:
                base = systems[floor]
                ratios = system.median / base.median, system.best / base.best
                line += "; against the floor {:.2f}, {:.2f}".format(*ratios)
            print(line)
