"""Several folders as the parts of one experiment: they are joined, or refused."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedhet.errors import ConfigError, clean
from fedhet.report.folders import Cell, Source, Values, parsed, read_one

# Overrides that change how or where runs are made, or what is made of them, but no result.
NO_RESULT = ("engine", "figures", "title", "on_other_code")
NOT_OF_RUNS = ("hydra.", "axes.", "report.", "tune.", "engine.")
MISSING = "not given"


def read(folders: Path | str | Sequence[Path | str]) -> Source:
    """Read the summaries of all runs in the folders.

    Raises:
        ConfigError: a folder has no runs, or they are of different experiments.
        DataError: an experiment.json is damaged.
    """
    paths = [Path(f) for f in ([folders] if isinstance(folders, str | Path) else folders)]
    sources = [read_one(path) for path in paths]
    if not sources:
        raise ConfigError("report: no folder is given")
    joined = sources[0]
    for source, other in pairwise(sources):
        _refuse_different(source, other)
        joined = Source(
            [*joined.folders, *other.folders],
            _joined(joined.experiment, other.experiment),
            [*joined.cells, *other.cells],
        )
    if len(sources) > 1:
        joined.cells = _best_of(joined.cells)
    return joined


def _refuse_different(first: Source, other: Source) -> None:
    """Refuse parts that are not of the same experiment with the same settings."""
    one, two = first.experiment, other.experiment
    both = f"{first.folders[0]} and {other.folders[0]}"
    names = [experiment.get("experiment") for experiment in (one, two)]
    if names[0] != names[1] or bool(one) != bool(two):
        told = [clean(f"{name!r}") if name else "no experiment" for name in names]
        raise ConfigError(
            f"{both} are of different experiments ({told[0]} and {told[1]}); write a report of each"
        )
    if not one:
        return
    if set(one["axes"]) != set(two["axes"]):
        told = [clean(", ".join(experiment["axes"])) for experiment in (one, two)]
        raise ConfigError(f"{both} have different axes ({told[0]}; {told[1]})")
    known = "fixed" in one and "fixed" in two
    axes = {*one["axes"], *two["axes"]}
    lines = [_of_runs(e.get("fixed" if known else "command"), axes) for e in (one, two)]
    _refuse_difference(both, "runs", *lines)
    digests = [experiment.get("digest") for experiment in (one, two)]
    if all(digests) and digests[0] != digests[1]:
        raise ConfigError(
            f"{both} have the same name, but the file of the experiment gave their runs different"
            f" settings (digests {clean(str(digests[0]))} and {clean(str(digests[1]))})"
        )


def _of_runs(lines: Any, axes: Collection[str]) -> Values:
    """The overrides that change results of all runs alike, key -> value."""
    given = [str(line) for line in lines] if isinstance(lines, list) else []
    # What is left of a command are flags, such as --config-dir, and their values.
    given = [line for line in given if ("=" in line or line[:1] == "~") and line[:1] != "-"]
    return {
        key: value
        for key, value in parsed(given).items()
        if key not in (*NO_RESULT, *axes) and not key.startswith(NOT_OF_RUNS)
    }


def _refuse_difference(both: str, what: str, one: Values, two: Values) -> None:
    for key in dict.fromkeys([*one, *two]):
        first, second = one.get(key, MISSING), two.get(key, MISSING)
        if first != second:
            raise ConfigError(
                f"{both} are {what} with different settings: {clean(key)} is"
                f" {clean(str(first))} in the first and {clean(str(second))} in the second, so that"
                " they cannot be compared; write a report of each"
            )


def _joined(first: Values, other: Values) -> Values:
    """experiment.json of an experiment whose parts lie in several folders."""
    if not first:
        return {}
    axes = {
        axis: list(dict.fromkeys([*map(_plain, values), *map(_plain, other["axes"][axis])]))
        for axis, values in first["axes"].items()
    }
    tuned = [*(first.get("tuned") or []), *(other.get("tuned") or [])]
    return {**first, "axes": axes, "tuned": tuned}


def _best_of(cells: list[Cell]) -> list[Cell]:
    """One cell for each combination of axes, one that has a result where there is one.

    Raises:
        ConfigError: two of them are runs with different settings.
    """
    kept: dict[str, Cell] = {}
    for cell in cells:
        where = [cell.trial, cell.axes, cell.tuned if cell.trial else None]
        key = json.dumps(where if cell.axes else [str(cell.folder)], default=str, sort_keys=True)
        if key not in kept:
            kept[key] = cell
            continue
        earlier = kept[key]
        if earlier.counts and cell.counts:
            both = f"{earlier.folder} and {cell.folder}"
            _refuse_difference(both, "two results of one run", *map(_settings, (earlier, cell)))
        elif cell.counts:
            kept[key] = cell
    return list(kept.values())


def _settings(cell: Cell) -> Values:
    return _of_runs([f"{key}={value}" for key, value in cell.overrides.items()], ())


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value
