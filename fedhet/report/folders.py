"""The runs in a folder: those that an experiment names, or all that are found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fedhet.config.aliases import unfolded
from fedhet.config.lines import key_of, value_of
from fedhet.config.resuming import CELL
from fedhet.core.errors import ConfigError, DataError, clean, has_diverged
from fedhet.core.targets import TARGETS
from fedhet.record import schema
from fedhet.record.run_folder import RUNNING
from fedhet.record.schema import NUMBERS, READABLE, read_object
from fedhet.report.found import EXPERIMENT, SUMMARY, no_runs, run_folders

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
    found = run_folders(folder)
    if (folder / EXPERIMENT).exists():
        experiment = _experiment(folder / EXPERIMENT)
        cells = [_cell(folder, *entry) for entry in enumerate(experiment["cells"])]
    else:
        experiment = {}
        cells = [_found(path, _shown(path, folder)) for path in found]
    if not cells:
        raise ConfigError(no_runs(folder))
    return FoundRuns([folder], experiment, cells)


def _shown(path: Path, folder: Path) -> str:
    inner = path.relative_to(folder).as_posix()
    return folder.resolve().name if inner == "." else inner


def _experiment(path: Path) -> Values:
    content = read_object(path)
    if content.get("format") not in READABLE:
        found = f"has format {content.get('format')!r}; this version of fedhet reads {_READS}"
        raise ConfigError(f"{path} {found}")
    return read_object(path, schema.EXPERIMENT, ("axes", "cells"))


def _cell(home: Path, number: int, entry: Any) -> FoundRun:
    """A cell that experiment.json names; its own cell.json says how it ended."""
    if wrong := schema.fault(entry, schema.CELL, ("folder", "axes")):
        place = f"cells[{number}]"
        told = f"its entry in {EXPERIMENT} is damaged: {wrong}"
        return FoundRun(home / place, place, UNREADABLE, told, summary={}, overrides={})
    folder = home / entry["folder"]
    about: Values = {"status": NOT_RUN, "reason": NOT_RUN}
    if not _is_below(folder, home):
        about = {"status": UNREADABLE, "reason": "its folder is not in that of the experiment"}
    else:
        with suppress(FileNotFoundError, NotADirectoryError):
            try:
                about = read_object(folder / CELL, schema.STATE, ("status",))
            except DataError:
                about = {"status": UNREADABLE, "reason": f"{CELL} is damaged"}
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
        reason = cell.reason
        _add_summary(cell)
        if cell.status == FINISHED and about["status"] == FAILED:
            cell.status = FAILED
        cell.reason = reason or cell.reason
    return cell


def _is_below(folder: Path, home: Path) -> bool:
    try:
        return home.resolve() in folder.resolve().parents
    except (OSError, ValueError, RuntimeError):  # a null byte, or links in a circle
        return False


def _found(folder: Path, name: str) -> FoundRun:
    """A run folder that no experiment names."""
    cell = FoundRun(folder, name, FINISHED, None, summary={}, overrides={})
    try:
        lines = yaml.safe_load(unfolded((folder / "overrides.yaml").read_text(encoding="utf-8")))
        cell.overrides = parsed(lines if isinstance(lines, list) else [])
    except (OSError, ValueError, yaml.YAMLError):
        cell.reason = "overrides.yaml is missing or damaged"  # summary.json tells enough
    reason = cell.reason
    _add_summary(cell)
    cell.reason = cell.reason or reason
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
