"""The runs in a folder, those that an experiment names or all that are found, as tidy frames."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from fedhet.core.errors import ConfigError, DataError, clean, has_diverged
from fedhet.core.targets import TARGETS, Classes
from fedhet.data import forms
from fedhet.data.forms import read_object
from fedhet.runs.config.lines import key_of, value_of
from fedhet.runs.config.resuming import CELL
from fedhet.runs.record import schema
from fedhet.runs.record.run_folder import RUNNING
from fedhet.runs.record.schema import NUMBERS, READABLE, yaml_text
from fedhet.runs.record.summary import columns, method_name
from fedhet.study.report.places import EXPERIMENT, SUMMARY, run_folders

Values = dict[str, Any]
# Overrides that the method's label already tells.
OF_THE_LABEL = ("method", "plugin", "server_opt", "merge")
FINISHED, DIVERGED, FAILED = "finished", "diverged", "failed"
NOT_RUN, UNREADABLE = "not run", "unreadable"
_READS = " and ".join(map(str, READABLE))
_NEEDED = ("status", "method", "plugins", "partition", "seed")  # a run has them from its start
# The scores of each kind of target have names of their own.
_OF_ANY_TARGET = schema.SUMMARY | {
    name: form
    for target in TARGETS.values()
    if target.keys
    for name, form in {
        **dict.fromkeys((target.score(), target.key("last_k")), NUMBERS),
        **dict.fromkeys((target.clients_key(), target.key("clients_worst_decile")), float),
    }.items()
}


@dataclass
class FoundRun:
    """A run, or the place of one that is missing.

    Attributes:
        folder: the run folder, which need not exist.
        name: its path as the report prints it.
        status: finished, diverged, or why there is no result: failed, interrupted, not run,
            unreadable.
        reason: why it is missing, in one line; None if it is not.
        summary: the content of summary.json; empty if that cannot be read.
        overrides: those of its command line, key -> value.
        axes: axis -> value, of an experiment's cell.
        tuned: the settings that were tuned, or that a trial tries.
        trial: whether the run is a trial of the tuning.
        code: the version of the code that ran it, where it is recorded.
    """

    folder: Path
    name: str
    status: str
    reason: str | None
    summary: Values
    overrides: Values
    axes: Values = field(default_factory=dict)
    tuned: Values = field(default_factory=dict)
    trial: bool = False
    code: Values = field(default_factory=dict)

    @property
    def counts(self) -> bool:
        """Whether the run has a result; a divergence is one."""
        return self.status in (FINISHED, DIVERGED)


@dataclass
class FoundRuns:
    """What was found in the folders.

    Attributes:
        folders: the folders.
        experiment: the content of experiment.json; empty for other folders.
        cells: the runs.
    """

    folders: list[Path]
    experiment: Values
    cells: list[FoundRun]


def read_one(folder: Path) -> FoundRuns:
    """Read the summaries of all runs in a folder.

    Raises:
        ConfigError: it has no runs.
        DataError: its experiment.json is damaged.
    """
    found, path = run_folders(folder), folder / EXPERIMENT
    if not path.exists():
        names = [each.relative_to(folder).as_posix() for each in found]
        home = folder.resolve().name
        shown = (home if name == "." else name for name in names)
        return FoundRuns([folder], {}, list(map(_found, found, shown)))
    if (stated := read_object(path).get("format")) not in READABLE:
        raise ConfigError(f"{path} has format {stated!r}; this version of fedhet reads {_READS}")
    experiment = read_object(path, schema.EXPERIMENT, ("axes", "cells"))
    cells = [_cell(folder, *entry) for entry in enumerate(experiment["cells"])]
    return FoundRuns([folder], experiment, cells)


def _cell(home: Path, number: int, entry: Any) -> FoundRun:
    """A cell that experiment.json names; its own cell.json says how it ended."""
    if wrong := forms.fault(entry, schema.CELL, ("folder", "axes")):
        place = f"cells[{number}]"
        told = f"its entry in {EXPERIMENT} is damaged: {wrong}"
        return FoundRun(home / place, place, UNREADABLE, told, summary={}, overrides={})
    folder = home / entry["folder"]
    about = _state(folder, home)
    cell = FoundRun(
        folder,
        clean(entry["folder"]),
        about["status"],
        about.get("reason"),
        summary={},
        overrides=parsed(entry.get("overrides") or []),
        axes=entry["axes"],
        tuned=entry.get("tuned") or {},
        trial=entry.get("kind") == "trial",
        code=about.get("code") or {},
    )
    if cell.status == "running":
        cell.status, cell.reason = "interrupted", "interrupted, or still running"
    elif cell.status in (FINISHED, FAILED):
        _add_summary(cell)
        if cell.status == FINISHED:
            cell.status = about["status"]
        cell.reason = about.get("reason") or cell.reason
    return cell


def _state(folder: Path, home: Path) -> Values:
    """The content of a cell's cell.json; its status says so if there is none."""
    try:
        if home.resolve() in folder.resolve().parents:
            return read_object(folder / CELL, schema.STATE, ("status",))
    except (FileNotFoundError, NotADirectoryError):
        return {"status": NOT_RUN, "reason": NOT_RUN}
    except DataError:
        return {"status": UNREADABLE, "reason": f"{CELL} is damaged"}
    except (OSError, ValueError, RuntimeError):  # a null byte, or links in a circle: in no folder
        pass
    return {"status": UNREADABLE, "reason": "its folder is not in that of the experiment"}


def _found(folder: Path, name: str) -> FoundRun:
    """A run folder that no experiment names."""
    cell = FoundRun(folder, name, FINISHED, None, summary={}, overrides={})
    _add_summary(cell)
    try:
        lines = yaml.safe_load(yaml_text(folder / "overrides.yaml"))
        cell.overrides = parsed(lines if isinstance(lines, list) else [])
    except (OSError, ValueError, yaml.YAMLError):  # summary.json tells enough
        cell.reason = cell.reason or "overrides.yaml is missing or damaged"
    return cell


def _add_summary(cell: FoundRun) -> None:
    """Read summary.json into the cell, with what it says about the run's end."""
    path = cell.folder / SUMMARY
    try:
        summary = read_object(path)
        if (found := summary.get("format")) not in READABLE:
            raise DataError(f"its format is {found!r}, and this fedhet reads {_READS}")
        ended = ("models", "seconds", "bytes") if summary.get("status") == "ok" else ()
        cell.summary = read_object(path, _OF_ANY_TARGET, (*_NEEDED, *ended))
    except (OSError, DataError) as error:
        missing = f"{SUMMARY} is missing" if isinstance(error, OSError) else str(error)
        cell.status, cell.reason = UNREADABLE, missing.replace(f"{cell.folder}/", "")
        return
    if summary["status"] == "ok":
        cell.status, cell.reason = FINISHED, None
    elif summary.get("reason") == RUNNING:
        cell.status, cell.reason = "interrupted", RUNNING
    else:
        cell.status = summary["status"]
        cell.reason = clean(str(summary.get("reason")))
    if cell.status == FAILED and has_diverged(cell.reason):
        cell.status = DIVERGED


def parsed(lines: Sequence[Any]) -> Values:
    """Overrides as key -> value; values that are lists or mappings stay text."""
    values: Values = {}
    for line in map(str, lines):
        key, text = key_of(line), value_of(line)
        if key.startswith("hydra."):
            continue
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = text
        values[key] = text if isinstance(value, list | dict) else value
    return values


def scalar(value: Any) -> Any:
    """The value in a form that a column can hold."""
    return json.dumps(value) if isinstance(value, list | dict) else value


# ---- several folders as the parts of one experiment: they are joined, or refused
# Settings that change how or where runs are made, or what is made of them, but no result.
NO_RESULT = ("engine", "figures", "title", "on_other_code", "tracker")


def read(folders: Path | str | Sequence[Path | str]) -> FoundRuns:
    """Read the summaries of all runs in the folders.

    Raises:
        ConfigError: a folder has no runs, or they are of different experiments.
        DataError: an experiment.json is damaged, or names the folder of a run twice.
    """
    paths = [Path(f) for f in ([folders] if isinstance(folders, str | Path) else folders)]
    if not paths:
        raise ConfigError("report: no folder is given")
    parts = [read_one(path) for path in paths]
    joined = parts[0]
    for other in parts[1:]:
        both = f"{joined.folders[0]} and {other.folders[0]} are no parts of one experiment"
        _refuse_difference(both, _of_all(joined.experiment), _of_all(other.experiment))
        experiment = joined.experiment and _joined(both, joined.experiment, other.experiment)
        homes = [*joined.folders, *other.folders]
        joined = FoundRuns(homes, experiment, [*joined.cells, *other.cells])
    if len(parts) > 1:
        joined.cells = _best_of(joined.cells)
        common = os.path.commonpath([path.absolute() for path in paths])
        for cell in joined.cells:
            cell.name = Path(os.path.relpath(cell.folder, common)).as_posix()
    names = Counter(cell.name for cell in joined.cells)
    if twice := [name for name, count in names.items() if count > 1]:
        raise DataError(
            f"{joined.folders[0]}: {EXPERIMENT} names the folder {twice[0]} for two runs"
        )
    return joined


def _of_all(experiment: Values) -> Values:
    """What all parts of an experiment have in common; nothing of runs without an experiment."""
    if not experiment:
        return {}
    tune = experiment.get("tune") or {}
    return {
        "experiment": experiment.get("experiment"),
        "the set of axes": ", ".join(sorted(experiment["axes"])),
        **_settings(parsed(experiment.get("fixed") or [])),
        **{f"tune.{name}": tune.get(name) for name in ("space", "budget", "seeds", "per")},
        "report.metric": (experiment.get("report") or {}).get("metric"),
        "the digest of what its file gave the runs": experiment.get("digest"),
    }


def _settings(overrides: Values) -> Values:
    """The overrides that change results."""
    return {
        key: value for key, value in overrides.items() if key.partition(".")[0] not in NO_RESULT
    }


def _refuse_difference(what: str, one: Values, two: Values) -> None:
    for key in dict.fromkeys([*one, *two]):
        first, second = (each.get(key, "not given") for each in (one, two))
        if first != second:
            raise ConfigError(
                f"{what}: {clean(key)} is"
                f" {clean(str(first))} in the first and {clean(str(second))} in the second, so that"
                " they cannot be compared; write a report of each"
            )


def _joined(both: str, first: Values, other: Values) -> Values:
    """experiment.json of an experiment with parts in two folders.

    Raises:
        ConfigError: a value of an axis is tuned differently, or trials have chosen other values.
    """
    axes = {
        axis: list(dict.fromkeys(map(scalar, [*values, *other["axes"][axis]])))
        for axis, values in first["axes"].items()
    }
    # A part without a value of an axis has no settings that are tuned for this value.
    one, two = ((part.get("tune") or {}).get("own") or {} for part in (first, other))
    shared = one.keys() & two.keys()
    _refuse_difference(
        f"{both}, by what is tuned", *({key: own[key] for key in shared} for own in (one, two))
    )
    tune = {**first["tune"], "own": two | one} if first.get("tune") else None
    tuned: dict[str, Values] = {}  # of a part in which the trials were run
    for entry in [*(first.get("tuned") or []), *(other.get("tuned") or [])]:
        where = json.dumps(entry.get("axes"), default=str, sort_keys=True)
        earlier = tuned.get(where) or {}
        if earlier.get("chosen") and entry.get("chosen"):
            what = f"{both}, by what trials have chosen for {clean(where)}"
            _refuse_difference(what, earlier["chosen"], entry["chosen"])
        elif not earlier.get("chosen"):
            tuned[where] = entry
    return {**first, "axes": axes, "tune": tune, "tuned": list(tuned.values())}


def _best_of(cells: list[FoundRun]) -> list[FoundRun]:
    """One cell for each combination of axes, one that has a result where there is one.

    Raises:
        ConfigError: two of them are runs with different settings.
    """
    kept: dict[str, FoundRun] = {}
    for cell in cells:
        where = [cell.trial, cell.axes, cell.tuned if cell.trial else None]
        place = where if cell.axes else os.path.normpath(cell.folder.absolute())
        earlier = kept.setdefault(json.dumps(place, default=str, sort_keys=True), cell)
        if earlier.counts and cell.counts:
            what = f"{earlier.folder} and {cell.folder} are one run with different settings"
            _refuse_difference(what, _settings(earlier.overrides), _settings(cell.overrides))
        elif cell.counts or earlier.status == NOT_RUN:
            kept[json.dumps(place, default=str, sort_keys=True)] = cell
    return list(kept.values())


# ---- frames
# What runs of classes have in any case; the columns where no run has a result yet.
OF_BOTH = ("seconds.train", "bytes.up.model", "bytes.down.model")
OF_A_RUN = (
    *("acc_global.last", "acc_global.best_val", "acc_clients_mean", "loss_global"),
    "acc_val_weighted.best",
    *("seconds.total", *OF_BOTH),
)
OF_A_STEP = ("acc_global", "loss_global", "acc_clients_mean", "acc_val_weighted", *OF_BOTH)


def results(folder: Path | str | Sequence[Path | str]) -> Results:
    """Read the runs of an experiment, of a sweep, or of any folder with runs in it.

    Args:
        folder: a folder, or several of the same experiment.

    Raises:
        ConfigError: a folder has no runs, or they are of different experiments.
        DataError: an experiment.json is damaged.
    """
    return Results(read(folder))


class Results:
    """Runs as tidy pandas frames, which are read when they are first used.

    All frames have the columns `folder` and those of `keys`.

    Attributes:
        source: the runs and experiment.json, as they were read.
        axes: what differs between the runs, axis -> its values in their order. Those of an
            experiment are its own; in other folders, the overrides that differ, with the method and
            its plug-ins as one axis "method".
        problems: files that are damaged and were read as far as possible, one sentence each.
    """

    def __init__(self, source: FoundRuns) -> None:
        self.source = source
        self.problems: list[str] = []
        self.axes: dict[str, list[Any]] = (
            {axis: list(values) for axis, values in source.experiment["axes"].items()}
            if source.experiment
            else differing(source.cells)
        )
        self.cells = [cell for cell in source.cells if not cell.trial]
        for cell in source.cells:
            cell.axes = {axis: scalar(value) for axis, value in cell.axes.items()}
            if cell.counts and self._has_diverged(cell):
                cell.status = DIVERGED

    @property
    def keys(self) -> list[str]:
        """The columns that tell runs apart: the axes, and the seed."""
        return list(dict.fromkeys([*self.axes, "seed"]))

    @cached_property
    def runs(self) -> pd.DataFrame:
        """A row per run with its status, axes, overrides, and the scalars of its summary.json.

        Scores have their names in rounds.jsonl: `acc_global.last` is the last `acc_global`.
        An entry of an entry is the column `seconds.train`. Of a name that several have, the axis
        counts, then the override.
        """
        return self._frame(self.cells)

    @cached_property
    def trials(self) -> pd.DataFrame:
        """As `runs`, for the trials of an experiment's tuning; `tuned.*` are the values tried."""
        return self._frame([cell for cell in self.source.cells if cell.trial])

    @cached_property
    def missing(self) -> pd.DataFrame:
        """The runs without a result, each with its status and its reason."""
        rows = [
            {"folder": cell.name, **cell.axes, "status": cell.status, "reason": cell.reason}
            for cell in self.source.cells
            if not cell.counts
        ]
        return pd.DataFrame(rows, columns=["folder", *self.axes, "status", "reason"])

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """The lines of every run's rounds.jsonl; nested values are columns `seconds.train`."""
        rows = [
            {**self._key(cell), **dict(schema.leaves(step))}
            for cell in self.cells
            if cell.summary
            for step in self.steps(cell)
        ]
        columns = ["folder", *self.keys, "phase", "step", "round"]
        return pd.DataFrame(rows) if rows else _with(OF_A_STEP, pd.DataFrame(columns=columns))

    @cached_property
    def clients(self) -> pd.DataFrame:
        """The clients' scores at every evaluation, in long format, as in clients/*.parquet."""
        return self._clients(last=False)

    @cached_property
    def last_clients(self) -> pd.DataFrame:
        """As `clients`, at the last evaluation of each run only."""
        return self._clients(last=True)

    def steps(self, cell: FoundRun) -> list[Values]:
        """The lines of a run's rounds.jsonl, up to the first that is damaged."""
        steps: list[Values] = []
        try:
            for step in schema.read_steps(cell.folder / "rounds.jsonl"):
                steps.append(step)
        except DataError as error:
            self._note(cell, error)
        return steps

    def partition(self, cell: FoundRun) -> Values:
        """A run's partition.json; empty if it is missing or damaged."""
        return self._read(cell, "partition.json", schema.PARTITION)

    def environment(self, cell: FoundRun) -> Values:
        """A run's environment.json; empty if it is missing or damaged."""
        return self._read(cell, "environment.json", {})

    def _read(self, cell: FoundRun, name: str, form: Values) -> Values:
        try:
            return forms.read_object(cell.folder / name, form)
        except OSError:
            self._note(cell, f"{cell.folder}/{name} is missing")
        except DataError as error:
            self._note(cell, error)
        return {}

    def _note(self, cell: FoundRun, problem: object) -> None:
        told = str(problem).replace(str(cell.folder), cell.name)
        if told not in self.problems:
            self.problems.append(told)

    def _has_diverged(self, cell: FoundRun) -> bool:
        """Whether the model of a run with a result is no longer finite, if the summary has no loss.

        Its loss at the last evaluation is null, which is how NaN and infinity are written, where a
        score was measured.
        """
        if cell.summary.get("loss") is not None or cell.status == DIVERGED:
            return False
        target = TARGETS.get(cell.summary.get("target", Classes.name), Classes)
        keys = [target.key("global"), target.clients_key()] if target.keys else ["", ""]
        finite = True
        for step in self.steps(cell):
            losses = (
                step.get("loss_global"),
                step.get("loss_clients_mean", step.get("loss_clients_weighted")),
            )
            scores = [step.get(key) is not None for key in keys]
            if any(scores) or any(loss is not None for loss in losses):
                finite = any(scores) and all(
                    loss is not None for loss, was in zip(losses, scores, strict=True) if was
                )
        return not finite

    def _key(self, cell: FoundRun) -> Values:
        return {"folder": cell.name, "seed": cell.summary.get("seed"), **cell.axes}

    def _frame(self, cells: Sequence[FoundRun]) -> pd.DataFrame:
        rows = [
            {
                "folder": cell.name,
                **cell.axes,
                **{
                    name: value
                    for name, value in {**dict(flattened(cell.summary)), **cell.overrides}.items()
                    if name not in cell.axes
                },
                **{f"tuned.{name}": value for name, value in cell.tuned.items()},
                "status": cell.status,
                "reason": cell.reason,
            }
            for cell in cells
        ]
        columns = ["folder", *self.keys, "status", "reason"]
        frame = pd.DataFrame(rows) if rows else pd.DataFrame(columns=columns)
        return frame if any(cell.counts for cell in cells) else _with(OF_A_RUN, frame)

    def _clients(self, last: bool) -> pd.DataFrame:
        import pyarrow as pa
        import pyarrow.parquet as pq

        parts = []
        for cell in self.cells:
            if not cell.summary:
                continue
            files = sorted((cell.folder / "clients").glob("*.parquet"))
            for path in files[-1:] if last else files:
                try:
                    file = pq.ParquetFile(forms.plain_file(path, math.inf))
                    part = file.read().to_pandas()[schema.COLUMNS]
                except (OSError, ValueError, pa.ArrowException, KeyError):
                    self._note(cell, f"{path} is damaged")
                    continue
                for name, value in reversed(self._key(cell).items()):
                    part.insert(0, name, value)
                parts.append(part)
        columns = ["folder", *self.keys, *schema.COLUMNS]
        return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)


def _with(names: Sequence[str], frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with these columns, which are empty if it has not had them."""
    return frame.assign(**{name: float("nan") for name in names if name not in frame})


def flattened(summary: Values) -> Iterator[tuple[str, Any]]:
    """The scalars of summary.json by their dotted names; lists in a form that a column can hold."""
    names = columns(summary)
    names = {name: names[name] for name in names if not name.endswith(("last_k", "thresholds"))}
    if "validation" in names:
        names["validation"] += ".best"
    own = {
        names.get(name, name): SCALARS[name](value) if name in SCALARS else value
        for name, value in summary.items()
        if name != "columns"
    }
    yield from schema.leaves(own)


def _reached(thresholds: Sequence[Values]) -> Values:
    """The costs of reaching each threshold, by its score and its value."""
    costs: Values = {}
    for entry in thresholds:
        score, threshold = next(iter(entry.items()))
        known = {cost: entry.get(cost) for cost in ("rounds", "bytes", "seconds")}
        costs[f"{score}.{threshold:g}"] = known
    return costs


def _rounds_of(phases: Sequence[Values]) -> Values:
    return {phase["name"]: phase["rounds"] for phase in phases}


# What makes scalars of the lists in summary.json.
SCALARS: dict[str, Callable[[Any], Any]] = {
    "thresholds": _reached,
    "phases": _rounds_of,
    "failures": len,
    "plugins": ",".join,
    "models": ",".join,
}


# ---- what differs between runs that no experiment names
def differing(cells: Sequence[FoundRun]) -> dict[str, list[Any]]:
    """The axes of runs that no experiment names, which are also entered into the cells."""
    readable = [cell for cell in cells if cell.summary]
    names = dict.fromkeys(
        key for cell in readable for key in cell.overrides if key not in (*OF_THE_LABEL, "seed")
    )
    for cell in readable:
        cell.axes = {"method": method_name(cell.summary)}
        cell.axes["dataset"] = cell.summary.get("dataset") or "a Task"
        cell.axes |= {
            name: cell.overrides[name] if name in cell.overrides else configured(cell, name)
            for name in names
        }
        cell.axes["seed"] = cell.summary["seed"]
    kept: dict[str, list[Any]] = {}
    for axis in readable[0].axes if readable else ():
        values = list(dict.fromkeys(cell.axes[axis] for cell in readable))
        if len(values) > 1 or axis in ("method", "seed"):
            kept[axis] = sorted(values) if axis == "seed" else values
    for cell in readable:
        cell.axes = {axis: cell.axes[axis] for axis in kept}
    return kept


def configured(cell: FoundRun, name: str) -> Any:
    """The value that a setting had without an override, from the run's config.yaml."""
    try:
        node = yaml.safe_load(yaml_text(cell.folder / "config.yaml"))
        for part in name.split("."):
            node = node[part]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        return "default"
    if isinstance(node, dict):
        return node.get("name", "default")
    return scalar(node)
