"""Runs systems in alternation, each time in a process of its own, and says which goals they meet.
Imports nothing heavy.

A system is a command of this folder that prints one line of JSON. With exit code 3 it says that it
cannot run here, and on stderr why; it is then left out. OMP_NUM_THREADS is 1 everywhere."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ABSENT = 3


# fedhet's own classes for the benchmarks (pieces.py) are found by their names, also in Ray's
# processes.
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH")))),
    "FEDHET_TRUST": ",".join(filter(None, ("pieces", os.environ.get("FEDHET_TRUST")))),
}


@dataclass
class System:
    """What the repetitions of one system have printed; `absent` says why it could not run."""

    reps: list[dict[str, Any]] = field(default_factory=list)
    absent: str | None = None

    def value(self, key: str) -> float | None:
        """The median of the repetitions."""
        return statistics.median(rep[key] for rep in self.reps) if self.reps else None

    @property
    def timed(self) -> bool:
        return bool(self.reps) and "rounds" in self.reps[0]

    @property
    def median(self) -> float | None:
        """Seconds per round: the median of the repetitions' medians."""
        return (
            statistics.median(statistics.median(rep["rounds"]) for rep in self.reps)
            if self.reps
            else None
        )

    @property
    def best(self) -> float | None:
        """The best single round."""
        return min(min(rep["rounds"]) for rep in self.reps) if self.reps else None


@dataclass(frozen=True)
class Goal:
    """`measured` is to be `bound` at most, or at least where `least`; None where it could not be
    measured."""

    what: str
    measured: float | None
    bound: float
    unit: str = "x"
    least: bool = False

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "skipped"
        return (
            "met"
            if (self.measured >= self.bound if self.least else self.measured <= self.bound)
            else "MISSED"
        )


@dataclass
class Found:
    """What a cell has measured."""

    goals: list[Goal]
    systems: dict[str, System] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


def alternate(commands: Mapping[str, Sequence[str]], reps: int) -> dict[str, System]:
    """Every system once, then every system again, so that a slow minute of the machine meets them
    all."""
    systems = {name: System() for name in commands}
    for rep in range(reps):
        for name, (script, *arguments) in commands.items():
            if systems[name].absent is None:
                _progress(f"{rep + 1}/{reps} {name}")
                _once(systems[name], [str(HERE / script), *arguments])
    _progress("")
    return systems


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def _once(system: System, command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *command], env=ENVIRONMENT, capture_output=True, text=True
    )
    if done.returncode == ABSENT:
        system.absent = done.stderr.strip().rpartition("\n")[2]
    elif done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with exit code {done.returncode}:\n{done.stderr[-2000:]}"
        )
    else:
        system.reps.append(json.loads(done.stdout.strip().rpartition("\n")[2]))


def show(found: Found, floor: str = "floor") -> None:
    """The systems' rounds, with ratios to the floor where there is one, and the goals."""
    timed = {
        name: system for name, system in found.systems.items() if system.absent or system.timed
    }
    base = timed.get(floor)
    if timed:
        print(
            f"  {'seconds per round':24} {'median':>9} {'best':>9}"
            + (f"   / {floor}: median, best" if base else "")
        )
    for name, system in timed.items():
        if system.absent:
            print(f"  {name:24} skipped: {system.absent}")
            continue
        ratios = (
            f"{ratio(system.median, base.median):15.2f} {ratio(system.best, base.best):7.2f}"
            if base
            else ""
        )
        print(f"  {name:24} {system.median:9.4f} {system.best:9.4f}{ratios}")
    for note in found.notes:
        print(f"  {note}")
    for goal in found.goals:
        measured = "-" if goal.measured is None else f"{goal.measured:.3g} {goal.unit}"
        print(
            f"  {goal.verdict:8} {measured:>12}  (goal {'>=' if goal.least else '<='}"
            f" {goal.bound:.3g} {goal.unit})  {goal.what}"
        )


def plain(found: Found) -> dict[str, Any]:
    """For JSON."""
    systems = {
        name: {
            **vars(system),
            **({"median": system.median, "best": system.best} if system.timed else {}),
        }
        for name, system in found.systems.items()
    }
    return {
        "goals": [{**vars(goal), "verdict": goal.verdict} for goal in found.goals],
        "systems": systems,
        "notes": found.notes,
    }
