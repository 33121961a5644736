"""A CSV file of how long the runs of reproductions take, one line for each scale of each."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

from fedhet.core.errors import ConfigError


class Time(NamedTuple):
    """How long the runs of a reproduction take, one after another.

    Attributes:
        reproduction: its name.
        scale: the scale of the runs.
        runs: how many there are, without trials.
        trials: how many runs of the tuning precede them.
        seconds: the sum over all of them.
    """

    reproduction: str
    scale: str
    runs: int
    trials: int
    seconds: int


def read(path: Path) -> list[Time]:
    """The lines of the file; none if it does not exist.

    Raises:
        ConfigError: the file has other columns, or a number is none.
    """
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        head, *rows = list(csv.reader(file)) or [[]]
    try:
        if head and tuple(head) != Time._fields:
            raise ValueError(f"its columns are {','.join(head)}")
        return [
            Time(reproduction, scale, int(runs), int(trials), int(seconds))
            for reproduction, scale, runs, trials, seconds in rows
        ]
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; expected is {','.join(Time._fields)}") from error


def note(path: Path, time: Time) -> None:
    """Write a line to the file, in the place of an earlier one of the same name and scale.

    Raises:
        ConfigError: the file holds something else.
    """
    kept = [other for other in read(path) if other[:2] != time[:2]]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Time._fields)
        writer.writerows(sorted([*kept, time]))
