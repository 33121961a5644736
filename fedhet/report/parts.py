"""Several folders as the parts of one experiment: they are joined, or refused."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedhet.core.errors import ConfigError, DataError, clean
from fedhet.report.folders import NOT_RUN, FoundRun, FoundRuns, Values, parsed, read_one, scalar
from fedhet.report.found import EXPERIMENT

# Overrides that change how or where runs are made, or what is made of them, but no result.
NO_RESULT = ("engine", "figures", "title", "on_other_code", "tracker")
NOT_OF_RUNS = ("hydra.", "axes.", "report.", "tune.", "engine.", "tracker.")
MISSING = "not given"
DIGEST, TRIALS = "the digest of what its file gave the runs", "the number of trials"


def read(folders: Path | str | Sequence[Path | str]) -> FoundRuns:
    """Read the summaries of all runs in the folders.

    Raises:
        ConfigError: a folder has no runs, or they are of different experiments.
        DataError: an experiment.json is damaged, or names the folder of a run twice.
    """
    paths = [Path(f) for f in ([folders] if isinstance(folders, str | Path) else folders)]
    sources = [read_one(path) for path in paths]
    if not sources:
        raise ConfigError("report: no folder is given")
    joined = sources[0]
    for source, other in pairwise(sources):
        _refuse_different(source, other)
        both = f"{joined.folders[0]} and {other.folders[0]}"
        experiment = _joined(both, joined.experiment, other.experiment)
        homes, cells = [*joined.folders, *other.folders], [*joined.cells, *other.cells]
        joined = FoundRuns(homes, experiment, cells)
    if len(sources) > 1:
        joined.cells = _best_of(joined.cells)
        # The name of an experiment's cell has a digest, which tells it from those of other parts.
        if not joined.experiment or _twice(joined.cells):
            for home, source in zip(_shortest(paths), sources, strict=True):
                for cell in source.cells:
                    is_run = cell.folder == source.folders[0]
                    cell.name = home if is_run else f"{home}/{cell.name}"
    if name := _twice(joined.cells):
        raise DataError(f"{joined.folders[0]}: {EXPERIMENT} names the folder {name} for two runs")
    return joined


def _shortest(paths: Sequence[Path]) -> list[str]:
    """The last parts of each path, as few as tell different folders apart."""
    every = [Path(os.path.normpath(path.absolute())).parts for path in paths]
    length = next(
        n
        for n in range(1, max(map(len, every)) + 1)
        if len({parts[-n:] for parts in every}) == len(set(every))
    )
    return [Path(*parts[-length:]).as_posix() for parts in every]


def _twice(cells: Sequence[FoundRun]) -> str | None:
    """A name that several cells have."""
    counts = Counter(cell.name for cell in cells)
    return next((name for name, count in counts.items() if count > 1), None)


def _refuse_different(first: FoundRuns, other: FoundRuns) -> None:
    """Refuse parts that are not of the same experiment with the same settings."""
    one, two = first.experiment, other.experiment
    both = f"{first.folders[0]} and {other.folders[0]}"
    names = [str(e.get("experiment") or "no experiment") for e in (one, two)]
    if names[0] != names[1] or bool(one) != bool(two):
        raise ConfigError(
            f"{both} are of different experiments ({clean(f'{names[0]!r} and {names[1]!r}')});"
            " write a report of each"
        )
    if not one:
        return
    axes = {*one["axes"], *two["axes"]}
    lines = "fixed" if "fixed" in one and "fixed" in two else "command"
    parts = [
        {
            "the set of axes": ", ".join(sorted(part["axes"])),
            **_of_runs(part.get(lines), axes),
            # A part whose command line leaves a method out has no settings of its own for it.
            **{
                f"tune.{name}": (part.get("tune") or {}).get(name, MISSING)
                for name in ("space", "budget", "seeds", "per")
            },
            "report.metric": (part.get("report") or {}).get("metric"),
            DIGEST: part.get("digest"),
            TRIALS: ", ".join(
                sorted({str(t["trials"]) for t in part.get("tuned") or [] if "trials" in t})
            ),
        }
        for part in (one, two)
    ]
    for entry in (DIGEST, TRIALS):  # which parts of earlier versions have not
        if not all(part[entry] for part in parts):
            parts = [{**part, entry: None} for part in parts]
    _refuse_difference(f"{both} are parts of an experiment", *parts)


def _of_runs(lines: Any, axes: Collection[str]) -> Values:
    """The overrides that change results of all runs alike, key -> value."""
    # What is left of a command are flags, such as --config-dir, and their values.
    given = [line for line in lines or () if ("=" in line or line[:1] == "~") and line[:1] != "-"]
    return {
        key: value
        for key, value in parsed(given).items()
        if key not in (*NO_RESULT, *axes) and not key.startswith(NOT_OF_RUNS)
    }


def _refuse_difference(what: str, one: Values, two: Values) -> None:
    for key in dict.fromkeys([*one, *two]):
        first, second = one.get(key, MISSING), two.get(key, MISSING)
        if first != second:
            raise ConfigError(
                f"{what} with different settings: {clean(key)} is"
                f" {clean(str(first))} in the first and {clean(str(second))} in the second, so that"
                " they cannot be compared; write a report of each"
            )


def _joined(both: str, first: Values, other: Values) -> Values:
    """experiment.json of an experiment whose parts lie in several folders."""
    if not first:
        return {}
    axes = {
        axis: list(dict.fromkeys(map(scalar, [*values, *other["axes"][axis]])))
        for axis, values in first["axes"].items()
    }
    parts = (first, other)
    own = [(part.get("tune") or {}).get("own") or {} for part in parts]
    known = [{str(v) for values in part["axes"].values() for v in values} for part in parts]
    # What is tuned for a value of an axis, in which parts that have the value agree.
    shared = [
        {f"tune.own.{label}": each.get(label, {}) for label in sorted(known[0] & known[1])}
        for each in own
    ]
    _refuse_difference(f"{both} are parts of an experiment", *shared)
    spaces = {
        label: space
        for each, values in zip(reversed(own), reversed(known), strict=True)
        for label, space in each.items()
        if label in values
    }
    tune = {**first["tune"], "own": spaces} if first.get("tune") else None
    tuned = _chosen(both, [*(first.get("tuned") or []), *(other.get("tuned") or [])])
    return {**first, "axes": axes, "tune": tune, "tuned": tuned}


def _chosen(both: str, entries: Sequence[Values]) -> list[Values]:
    """One entry for each combination of axes, that of a part in which the trials were run.

    Raises:
        ConfigError: the trials of two parts have chosen different values.
    """
    kept: dict[str, Values] = {}
    for entry in entries:
        axes = entry.get("axes") or {}
        earlier = kept.setdefault(json.dumps(axes, default=str, sort_keys=True), entry)
        if not earlier.get("chosen"):
            kept[json.dumps(axes, default=str, sort_keys=True)] = entry
        elif entry.get("chosen"):
            where = ", ".join(f"{axis}={value}" for axis, value in axes.items())
            what = f"{both} are parts of an experiment, whose trials for {clean(where)} have ended"
            _refuse_difference(what, earlier["chosen"], entry["chosen"])
    return list(kept.values())


def _best_of(cells: list[FoundRun]) -> list[FoundRun]:
    """One cell for each combination of axes, one that has a result where there is one.

    Raises:
        ConfigError: two of them are runs with different settings.
    """
    kept: dict[str, FoundRun] = {}
    for cell in cells:
        where = [cell.trial, cell.axes, cell.tuned if cell.trial else None]
        place = where if cell.axes else [os.path.normpath(cell.folder.absolute())]
        key = json.dumps(place, default=str, sort_keys=True)
        earlier = kept.setdefault(key, cell)
        if earlier is cell:
            continue
        if earlier.counts and cell.counts:
            settings = [
                _of_runs([f"{key}={value}" for key, value in each.overrides.items()], ())
                for each in (earlier, cell)
            ]
            what = f"{earlier.folder} and {cell.folder} are two results of one run"
            _refuse_difference(what, *settings)
        elif cell.counts or earlier.status == NOT_RUN:
            kept[key] = cell
    return list(kept.values())
