"""Reads the runs of an experiment, or all runs in a folder, as tidy frames."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from fedhet.core.errors import ConfigError, DataError, clean, has_diverged
from fedhet.core.kinds import KINDS, OfClasses
from fedhet.data import forms
from fedhet.data.forms import plain_text, read_object
from fedhet.runs.config.lines import key_of, value_of
from fedhet.runs.record import schema
from fedhet.runs.record.schema import CELL_FILE, NUMBERS, READABLE, RUNNING, read_yaml
from fedhet.runs.record.scores import columns, method_name
from fedhet.study.report.places import EXPERIMENT, SUMMARY, run_folders

Values = dict[str, Any]
# Overrides that the method's label already contains.
OF_THE_LABEL = ("method", "plugin", "server_opt", "merge")
FINISHED, DIVERGED, FAILED = "finished", "diverged", "failed"
NOT_RUN, UNREADABLE = "not run", "unreadable"
_READS = " and ".join(map(str, READABLE))
_NEEDED = ("status", "method", "plugins", "partition", "seed")  # recorded at the start of a run
# Each kind of target has its own names of scores.
_OF_ANY_TARGET = schema.SUMMARY | {
    name: form
    for target in KINDS.values()
    if target.keys
    for name, form in {
        **dict.fromkeys((target.score(), target.key("last_k")), NUMBERS),
        **dict.fromkeys((target.clients_key(), target.key("clients_worst_decile")), float),
    }.items()
}


@dataclass
class FoundRun:
    """A run, which may be missing.

    Attributes:
        folder: the run folder; it may not exist.
        name: its path as the report prints it.
        status: finished or diverged; without a result: failed, interrupted, not run or unreadable.
        reason: why there is no result, in one line; None if there is one.
        summary: the content of summary.json; empty if it cannot be read.
        overrides: the overrides of its command line, key -> value.
        axes: axis -> value, from an experiment.
        tuned: the tuned settings and their chosen values; for a trial the tried values.
        trial: whether the run is a trial of the tuning.
        code: the version of the code that made it; empty if it is not recorded.
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

    @cached_property
    def config(self) -> Any:
        """The content of config.yaml."""
        return read_yaml(plain_text(self.folder / "config.yaml"))

    @property
    def counts(self) -> bool:
        """Whether the run has a result; divergence counts as a result."""
        return self.status in (FINISHED, DIVERGED)


@dataclass
class FoundRuns:
    """The runs in one or several folders.

    Attributes:
        folders: the folders.
        experiment: the content of experiment.json; empty if there is none.
        cells: the runs and trials.
    """

    folders: list[Path]
    experiment: Values
    cells: list[FoundRun]


def read_one(folder: Path) -> FoundRuns:
    """Read the summaries of all runs in a folder.

    Raises:
        ConfigError: the folder has no runs.
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
    """Read a run or trial that experiment.json names; its cell.json says how it ended."""
    if wrong := forms.fault(entry, schema.CELL, ("folder", "axes")):
        place = f"cells[{number}]"
        problem = f"its entry in {EXPERIMENT} is damaged: {wrong}"
        return FoundRun(home / place, place, UNREADABLE, problem, summary={}, overrides={})
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
    """Read cell.json; without it, or if it is damaged, return a status and a reason."""
    try:
        if home.resolve() in folder.resolve().parents:
            return read_object(folder / CELL_FILE, schema.STATE, ("status",))
    except (FileNotFoundError, NotADirectoryError):
        return {"status": NOT_RUN, "reason": NOT_RUN}
    except DataError:
        return {"status": UNREADABLE, "reason": f"{CELL_FILE} is damaged"}
    except (OSError, ValueError, RuntimeError):  # a null byte in the path, or a circle of links
        pass
    return {"status": UNREADABLE, "reason": "its folder is not in the folder of the experiment"}


def _found(folder: Path, name: str) -> FoundRun:
    """Read a run folder that belongs to no experiment."""
    cell = FoundRun(folder, name, FINISHED, None, summary={}, overrides={})
    _add_summary(cell)
    try:
        lines = read_yaml(plain_text(folder / "overrides.yaml"))
        cell.overrides = parsed(lines if isinstance(lines, list) else [])
    except (OSError, ValueError, yaml.YAMLError):  # summary.json is enough for the report
        cell.reason = cell.reason or "overrides.yaml is missing or damaged"
    return cell


def _add_summary(cell: FoundRun) -> None:
    """Read summary.json into `cell`, and set its status and reason."""
    path = cell.folder / SUMMARY
    try:
        summary = read_object(path)
        if (found := summary.get("format")) not in READABLE:
            raise DataError(f"its format is {found!r}, but this version of fedhet reads {_READS}")
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
        cell.status, cell.reason = summary["status"], clean(str(summary.get("reason")))
    if cell.status == FAILED and has_diverged(cell.reason):
        cell.status = DIVERGED


@cache
def _value(text: str) -> Any:
    """Return the value of an override: the runs of an experiment share most of them."""
    try:
        value = read_yaml(text)
    except yaml.YAMLError:
        return text
    return text if isinstance(value, list | dict) else value


def parsed(lines: Sequence[Any]) -> Values:
    """Parse overrides to key -> value; lists and mappings stay text."""
    texts = {key_of(line): value_of(line) for line in map(str, lines)}
    return {key: _value(text) for key, text in texts.items() if not key.startswith("hydra.")}


def scalar(value: Any) -> Any:
    """Return a list or mapping as JSON text, and any other value unchanged, for a column."""
    return json.dumps(value) if isinstance(value, list | dict) else value


# ---- several folders: the parts of one experiment are joined, other folders are refused
# Settings that change no result.
NO_RESULT = ("engine", "figures", "title", "on_other_code", "tracker")


def read(folders: Path | str | Sequence[Path | str]) -> FoundRuns:
    """Read the summaries of all runs in the folders.

    Raises:
        ConfigError: a folder has no runs, or the folders belong to different experiments.
        DataError: an experiment.json is damaged, or gives two runs the same folder.
    """
    paths = [Path(f) for f in ([folders] if isinstance(folders, str | Path) else folders)]
    if not paths:
        raise ConfigError("report: no folder is given")
    parts = [read_one(path) for path in paths]
    joined = parts[0]
    for other in parts[1:]:
        both = f"{joined.folders[0]} and {other.folders[0]} are not parts of one experiment"
        _refuse_difference(both, _of_all(joined.experiment), _of_all(other.experiment))
        experiment = joined.experiment and _joined(both, joined.experiment, other.experiment)
        joined = FoundRuns(
            [*joined.folders, *other.folders], experiment, [*joined.cells, *other.cells]
        )
    if len(parts) > 1:
        joined.cells = _best_of(joined.cells)
        common = os.path.commonpath([path.absolute() for path in paths])
        for cell in joined.cells:
            cell.name = Path(os.path.relpath(cell.folder, common)).as_posix()
    names = Counter(cell.name for cell in joined.cells)
    if twice := [name for name, count in names.items() if count > 1]:
        raise DataError(
            f"{joined.folders[0]}: {EXPERIMENT} gives two runs the same folder {twice[0]}"
        )
    return joined


def _of_all(experiment: Values) -> Values:
    """Return the entries that all parts of an experiment must share; empty without one."""
    if not experiment:
        return {}
    tune = experiment.get("tune") or {}
    return {
        "experiment": experiment.get("experiment"),
        "the set of axes": ", ".join(sorted(experiment["axes"])),
        **_settings(parsed(experiment.get("fixed") or [])),
        **{f"tune.{name}": tune.get(name) for name in ("space", "budget", "seeds", "per")},
        "report.metric": (experiment.get("report") or {}).get("metric"),
        "the digest of the settings from its file": experiment.get("digest"),
    }


def _settings(overrides: Values) -> Values:
    """Return the overrides that can change results."""
    return {
        key: value for key, value in overrides.items() if key.partition(".")[0] not in NO_RESULT
    }


def _refuse_difference(what: str, one: Values, two: Values) -> None:
    for key in dict.fromkeys([*one, *two]):
        first, second = (each.get(key, "not given") for each in (one, two))
        if first != second:
            raise ConfigError(
                f"{what}: {clean(key)} is"
                f" {clean(str(first))} in the first and {clean(str(second))} in the second; write"
                " one report for each"
            )


def _joined(both: str, first: Values, other: Values) -> Values:
    """Join the experiment.json files of two parts of an experiment.

    Raises:
        ConfigError: the parts tune a label differently, or their trials chose different values.
    """
    axes = {
        axis: list(dict.fromkeys(map(scalar, [*values, *other["axes"][axis]])))
        for axis, values in first["axes"].items()
    }
    # A part may lack a label, and then the settings that are tuned for it.
    one, two = ((part.get("tune") or {}).get("own") or {} for part in (first, other))
    shared = one.keys() & two.keys()
    _refuse_difference(
        f"{both}, because their tuning differs",
        *({key: own[key] for key in shared} for own in (one, two)),
    )
    tune = {**first["tune"], "own": two | one} if first.get("tune") else None
    tuned: dict[str, Values] = {}  # entries of the part in which the trials ran
    for entry in [*(first.get("tuned") or []), *(other.get("tuned") or [])]:
        where = json.dumps(entry.get("axes"), default=str, sort_keys=True)
        earlier = tuned.get(where) or {}
        if earlier.get("chosen") and entry.get("chosen"):
            what = f"{both}, because their trials chose different values for {clean(where)}"
            _refuse_difference(what, earlier["chosen"], entry["chosen"])
        elif not earlier.get("chosen"):
            tuned[where] = entry
    return {**first, "axes": axes, "tune": tune, "tuned": list(tuned.values())}


def _best_of(cells: list[FoundRun]) -> list[FoundRun]:
    """Keep one run for each combination of axes, preferably one with a result.

    Raises:
        ConfigError: two runs of one combination have results, and different settings.
    """
    kept: dict[str, FoundRun] = {}
    for cell in cells:
        where = [cell.trial, cell.axes, cell.tuned if cell.trial else None]
        place = where if cell.axes else os.path.normpath(cell.folder.absolute())
        earlier = kept.setdefault(json.dumps(place, default=str, sort_keys=True), cell)
        if earlier.counts and cell.counts:
            what = f"{earlier.folder} and {cell.folder} are the same run with different settings"
            _refuse_difference(what, _settings(earlier.overrides), _settings(cell.overrides))
        elif cell.counts or earlier.status == NOT_RUN:
            kept[json.dumps(place, default=str, sort_keys=True)] = cell
    return list(kept.values())


# ---- frames
# Columns of every run that learns classes. Frames have them even if no run has a result yet.
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
        folder: a folder, or several folders of the same experiment.

    Raises:
        ConfigError: a folder has no runs, or the folders belong to different experiments.
        DataError: an experiment.json is damaged.
    """
    return Results(read(folder))


class Results:
    """Runs as tidy pandas frames. A frame is read from the disk at its first use.

    All frames have the column `folder` and the columns of `keys`.

    Attributes:
        source: the runs and the content of experiment.json.
        axes: axis -> its values in order. An experiment has its own axes. In other folders, the
            axes are the overrides that differ; the method with its plug-ins is one axis, "method".
        problems: one sentence for each damaged or missing file; it was read as far as possible.
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
        """The columns that identify a run: the axes and the seed."""
        return list(dict.fromkeys([*self.axes, "seed"]))

    @cached_property
    def runs(self) -> pd.DataFrame:
        """A row per run with its status, axes, overrides, and the scalars of its summary.json.

        Scores have their names in rounds.jsonl: `acc_global.last` is the last `acc_global`.
        Nested entries have dots: `seconds.train`. If names are equal, an axis comes before an
        override, and an override before an entry of summary.json.
        """
        return self._frame(self.cells)

    @cached_property
    def trials(self) -> pd.DataFrame:
        """As `runs`, for the trials of an experiment; `tuned.*` are the values that they try."""
        return self._frame([cell for cell in self.source.cells if cell.trial])

    @cached_property
    def missing(self) -> pd.DataFrame:
        """The runs and trials without a result, with status and reason."""
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
        """Return the lines of a run's rounds.jsonl, up to the first damaged line."""
        steps: list[Values] = []
        try:
            steps.extend(schema.read_steps(cell.folder / "rounds.jsonl"))
        except DataError as error:
            self._note(cell, error)
        return steps

    def partition(self, cell: FoundRun) -> Values:
        """Return a run's partition.json; empty if it is missing or damaged."""
        return self._read(cell, "partition.json", schema.PARTITION)

    def environment(self, cell: FoundRun) -> Values:
        """Return a run's environment.json; empty if it is missing or damaged."""
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
        sentence = str(problem).replace(str(cell.folder), cell.name)
        if sentence not in self.problems:
            self.problems.append(sentence)

    def _has_diverged(self, cell: FoundRun) -> bool:
        """Whether the loss of a run with a result was NaN or infinite at the last evaluation.

        rounds.jsonl writes NaN and infinity as null. So the run has diverged if it has a score but
        a null loss. The summary of such a run has no loss.
        """
        if cell.summary.get("loss") is not None or cell.status == DIVERGED:
            return False
        target = KINDS.get(cell.summary.get("target", OfClasses.name), OfClasses)
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

        kinds = pa.schema(
            [(name, pa.type_for_alias(kind)) for name, kind in schema.COLUMNS.items()]
        )
        tables, keys = [], []
        for cell in self.cells:
            if not cell.summary:
                continue
            files = sorted((cell.folder / "clients").glob("*.parquet"))
            for path in files[-1:] if last else files:
                try:
                    file = pq.ParquetFile(forms.plain_file(path, math.inf))
                    tables.append(file.read().select([*schema.COLUMNS]).cast(kinds))
                    keys.append(self._key(cell))
                except (OSError, ValueError, pa.ArrowException, KeyError):
                    self._note(cell, f"{path} is damaged")
        if not tables:
            return pd.DataFrame(columns=["folder", *self.keys, *schema.COLUMNS])
        # pandas takes milliseconds for each frame, so all tables become one.
        rows = pa.concat_tables(tables).to_pandas()
        of_row = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
        return pd.concat([pd.DataFrame(keys).iloc[of_row].reset_index(drop=True), rows], axis=1)


def _with(names: Sequence[str], frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame with these columns; new columns are empty."""
    return frame.assign(**{name: float("nan") for name in names if name not in frame})


def flattened(summary: Values) -> Iterator[tuple[str, Any]]:
    """Yield the dotted names and the scalars of summary.json; lists become scalars by SCALARS."""
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
    """Return <score>.<threshold> -> the costs of reaching the threshold."""
    return {
        f"{score}.{threshold:g}": {cost: entry.get(cost) for cost in ("rounds", "bytes", "seconds")}
        for entry in thresholds
        for score, threshold in [*entry.items()][:1]
    }


# Functions that turn the lists in summary.json into scalars.
SCALARS: dict[str, Callable[[Any], Any]] = {
    "thresholds": _reached,
    "phases": lambda phases: {phase["name"]: phase["rounds"] for phase in phases},
    "failures": len,
    "plugins": ",".join,
    "models": ",".join,
}


# ---- axes of runs without an experiment
def differing(cells: Sequence[FoundRun]) -> dict[str, list[Any]]:
    """Find the axes of runs without an experiment, and write their values into the runs."""
    readable = [cell for cell in cells if cell.summary]
    names = dict.fromkeys(
        key for cell in readable for key in cell.overrides if key not in (*OF_THE_LABEL, "seed")
    )
    for cell in readable:
        cell.axes = {
            "method": method_name(cell.summary),
            "dataset": cell.summary.get("dataset") or "a Task",
            **{
                name: cell.overrides[name] if name in cell.overrides else configured(cell, name)
                for name in names
            },
            "seed": cell.summary["seed"],
        }
    kept: dict[str, list[Any]] = {}
    for axis in readable[0].axes if readable else ():
        values = list(dict.fromkeys(cell.axes[axis] for cell in readable))
        if len(values) > 1 or axis in ("method", "seed"):
            kept[axis] = sorted(values) if axis == "seed" else values
    for cell in readable:
        cell.axes = {axis: cell.axes[axis] for axis in kept}
    return kept


def configured(cell: FoundRun, name: str) -> Any:
    """Return the value of a setting without an override, from the run's config.yaml."""
    try:
        node = cell.config
        for part in name.split("."):
            node = node[part]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        return "default"
    if isinstance(node, dict):
        return node.get("name", "default")
    return scalar(node)
