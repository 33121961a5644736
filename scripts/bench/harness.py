"""Runs systems in alternation, each time in a new process, and compares the results with goals.

A system is a command of a script in this folder; the script prints one line of JSON. If pfl is not
installed, the system that needs it is skipped, and its values are NaN. OMP_NUM_THREADS is 1
everywhere. This module imports nothing heavy.
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
LONGEST = 300  # characters of a system's output that are shown
NO_PFL = "ModuleNotFoundError: No module named 'pfl'"

# So that fedhet can import the classes of pieces.py by name, also in Ray's processes.
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", str(HERE))]),
    "FEDHET_TRUST": "pieces",
}


@dataclass
class System:
    """The output of one system's repetitions.

    Attributes:
        reps: the JSON object of each repetition. If it has "rounds" (seconds), it also gets their
            "median" and their "best".
        absent: why the system cannot run here; None if it can.
    """

    reps: list[dict[str, Any]] = field(default_factory=list)
    absent: str | None = None

    def add(self, printed: dict[str, Any]) -> None:
        """Add a repetition."""
        if rounds := printed.get("rounds"):
            printed |= {"median": statistics.median(rounds), "best": min(rounds)}
        self.reps.append(printed)

    def value(self, key: str) -> float:
        """Return the median over the repetitions, or the best of all; NaN without repetitions."""
        values = [rep[key] for rep in self.reps] or [math.nan]
        return min(values) if key == "best" else statistics.median(values)


Systems = Mapping[str, System]


@dataclass(frozen=True)
class Goal:
    """A measured value, and its bound.

    Attributes:
        what: the value in words.
        measured: a function that reads the value from the systems.
        bound: the largest value that meets the goal, or the smallest if `least`; None if the value
            is only shown.
        unit: the unit of the value and the bound; "x" for a ratio.
        least: whether `bound` is a lower bound.
    """

    what: str
    measured: Callable[[Systems], float]
    bound: float | None = None
    unit: str = "x"
    least: bool = False

    def verdict(self, value: float) -> str:
        """Return "met" or "MISSED", "skipped" if there is no value, or "" if there is no bound."""
        if self.bound is None:
            return ""
        if math.isnan(value):
            return "skipped"
        return "met" if (value >= self.bound if self.least else value <= self.bound) else "MISSED"


@dataclass(frozen=True)
class Cell:
    """A part of the benchmark.

    Attributes:
        about: a description of the measurement.
        systems: name of a system -> its script, and the script's arguments.
        goals: the values to measure, and their bounds.
    """

    about: str
    systems: Mapping[str, Sequence[str]]
    goals: Sequence[Goal]

    def run(self, reps: int) -> dict[str, Any]:
        """Run the cell, print its rounds and goals, and return all as values for JSON."""
        systems = alternate(self.systems, reps)
        _show(systems)
        goals = []
        for goal in self.goals:
            value = goal.measured(systems)
            verdict = goal.verdict(value)
            sign = ">=" if goal.least else "<="
            bound = "" if goal.bound is None else f"(goal {sign} {goal.bound:.3g} {goal.unit})  "
            print(f"  {verdict:8} {value:8.3g} {goal.unit:4} {bound}{goal.what}")
            measured = None if math.isnan(value) else value
            goals.append({**vars(goal), "measured": measured, "verdict": verdict})
        return {"goals": goals, "systems": {name: vars(found) for name, found in systems.items()}}


def timed(components: Mapping[str, Callable[[], object]], reps: int) -> dict[str, list[float]]:
    """Return the seconds of each component in each repetition. The components alternate.

    The first call of each component fills caches, and does not count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in components}
    for _ in range(reps + 1):
        for name, component in components.items():
            began = time.perf_counter()
            component()
            seconds[name].append(time.perf_counter() - began)
    return {name: times[1:] for name, times in seconds.items()}


def alternate(commands: Mapping[str, Sequence[str]], reps: int) -> dict[str, System]:
    """Run every system once, then every system again, so that slow minutes affect all of them."""
    systems = {name: System() for name in commands}
    for rep in range(reps):
        for name, (script, *words) in commands.items():
            if systems[name].absent:
                continue
            print(f"{rep + 1}/{reps} {name}", file=sys.stderr, flush=True)
            command = [sys.executable, str(HERE / script), *words]
            ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
            if ended.stderr.strip().endswith(NO_PFL):
                systems[name].absent = NO_PFL
                continue
            if ended.returncode:
                problem = f"{script} {' '.join(words)} failed with exit code {ended.returncode}"
                raise RuntimeError(f"{problem}:\n{ended.stderr[-2000:]}")
            last = ended.stdout.strip().rpartition("\n")[2]
            # Print the result at once, so that a later failure does not lose it.
            print(f"    {last[:LONGEST]}", file=sys.stderr, flush=True)
            systems[name].add(json.loads(last))
    return systems


def answer(*questions: Callable[..., dict[str, Any]]) -> None:
    """Call the function that the command line names, with its other words; print the result."""
    name, *words = sys.argv[1:]
    chosen = {question.__name__: question for question in questions}[name]
    print(json.dumps(chosen(*(int(word) if word.isdigit() else word for word in words))))


def _show(systems: Systems) -> None:
    """Print the systems' rounds, with their ratios to the floor."""
    for name, system in systems.items():
        if system.absent:
            print(f"  {name:24} skipped: {system.absent}")
        elif "rounds" in system.reps[0]:
            median, best = system.value("median"), system.value("best")
            line = f"  {name:24} seconds per round: median {median:.4f}, best {best:.4f}"
            if "floor" in systems:
                of_median, of_best = (systems["floor"].value(key) for key in ("median", "best"))
                line += f"; against the floor {median / of_median:.2f}, {best / of_best:.2f}"
            print(line)
