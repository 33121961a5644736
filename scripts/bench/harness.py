"""Runs systems in alternation, each time in a new process, and compares the results with goals.

A system is a script of this folder that prints one line of JSON. If it cannot run here, it exits
with code ABSENT and gives the reason on stderr; it is then skipped. OMP_NUM_THREADS is 1
everywhere. This module imports nothing heavy.
"""

from __future__ import annotations

import json
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

    def value(self, key: str) -> float | None:
        """The median over the repetitions; None if there are none."""
        return statistics.median(rep[key] for rep in self.reps) if self.reps else None

    @property
    def timed(self) -> bool:
        """Whether the repetitions have timed rounds."""
        return bool(self.reps) and "rounds" in self.reps[0]

    @property
    def median(self) -> float | None:
        """Seconds per round: the median of the repetitions' medians."""
        if not self.reps:
            return None
        return statistics.median(statistics.median(rep["rounds"]) for rep in self.reps)

    @property
    def best(self) -> float | None:
        """Seconds of the best single round."""
        return min(min(rep["rounds"]) for rep in self.reps) if self.reps else None


@dataclass(frozen=True)
class Goal:
    """A bound on a measured value.

    Attributes:
        what: the value in words.
        measured: the value; None if it could not be measured.
        bound: the largest value that meets the goal, or the smallest if `least`.
        unit: the unit of both; "x" for a ratio.
        least: whether `bound` is a lower bound.
    """

    what: str
    measured: float | None
    bound: float
    unit: str = "x"
    least: bool = False

    @property
    def verdict(self) -> str:
        """ "met", "MISSED" or "skipped"."""
        if self.measured is None:
            return "skipped"
        met = self.measured >= self.bound if self.least else self.measured <= self.bound
        return "met" if met else "MISSED"


@dataclass
class Result:
    """What a cell has measured."""

    goals: list[Goal]
    systems: dict[str, System] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


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


def ratio(a: float | None, b: float | None) -> float | None:
    """a / b; None if either was not measured."""
    return None if a is None or b is None else a / b


def alternate(commands: Mapping[str, Sequence[str]], reps: int) -> dict[str, System]:
    """Run every system once, then every system again, so that slow minutes affect all of them."""
    systems = {name: System() for name in commands}
    for rep in range(reps):
        for name, (script, *arguments) in commands.items():
            if systems[name].absent is None:
                _show_progress(f"{rep + 1}/{reps} {name}")
                _run_once(systems[name], [str(HERE / script), *arguments])
    _show_progress("")
    return systems


def _show_progress(line: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def _run_once(system: System, command: list[str]) -> None:
    process = subprocess.run(
        [sys.executable, *command], env=ENVIRONMENT, capture_output=True, text=True
    )
    if process.returncode == ABSENT:
        system.absent = process.stderr.strip().rpartition("\n")[2]
    elif process.returncode:
        raise RuntimeError(
            f"{' '.join(command)} failed with exit code {process.returncode}:\n"
            f"{process.stderr[-2000:]}"
        )
    else:
        system.reps.append(json.loads(process.stdout.strip().rpartition("\n")[2]))


def show(result: Result, floor: str = "floor") -> None:
    """Print the systems' rounds, with ratios to the floor if there is one, and the goals."""
    systems = result.systems.items()
    timed = {name: system for name, system in systems if system.absent or system.timed}
    base = timed.get(floor)
    if timed:
        against = f"   / {floor}: median, best" if base else ""
        print(f"  {'seconds per round':24} {'median':>9} {'best':>9}{against}")
    for name, system in timed.items():
        if system.absent:
            print(f"  {name:24} skipped: {system.absent}")
            continue
        line = f"  {name:24} {system.median:9.4f} {system.best:9.4f}"
        if base:
            line += f"{ratio(system.median, base.median):15.2f}"
            line += f" {ratio(system.best, base.best):7.2f}"
        print(line)
    for note in result.notes:
        print(f"  {note}")
    for goal in result.goals:
        measured = "-" if goal.measured is None else f"{goal.measured:.3g} {goal.unit}"
        bound = f"{'>=' if goal.least else '<='} {goal.bound:.3g} {goal.unit}"
        print(f"  {goal.verdict:8} {measured:>12}  (goal {bound})  {goal.what}")


def to_json(result: Result) -> dict[str, Any]:
    """The result as values that JSON can hold."""
    systems = {}
    for name, system in result.systems.items():
        times = {"median": system.median, "best": system.best} if system.timed else {}
        systems[name] = {**vars(system), **times}
    goals = [{**vars(goal), "verdict": goal.verdict} for goal in result.goals]
    return {"goals": goals, "systems": systems, "notes": result.notes}
