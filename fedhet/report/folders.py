"""The runs in a folder: those that an experiment names, or all that are found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fedhet.config.aliases import unfolded
from fedhet.config.lines import key_of, value_of
from fedhet.config.resuming import CELL
from fedhet.core.errors import ConfigError, DataError, clean, has_diverged
from fedhet.record.run_folder import FORMAT, RUNNING
from fedhet.record.summary import method_name
from fedhet.report import checked
from fedhet.report.found import EXPERIMENT, SUMMARY, no_runs, run_folders

Values = dict[str, Any]
# Overrides that the method's label already tells.
OF_THE_LABEL = ("method", "plugin", "server_opt", "merge")
FINISHED, DIVERGED, FAILED = "finished", "diverged", "failed"
NOT_RUN, UNREADABLE = "not run", "unreadable"
NEEDED = (("folder", str), ("axes", dict))  # of the entry of a cell


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
    try:
        content = checked.load(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is damaged, or cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else None
        raise ConfigError(f"{path} has format {found!r}; this version of fedhet reads {FORMAT}")
    if content.get("axes") is None or content.get("cells") is None:
        raise DataError(f"{path} is damaged: it lists no axes or no cells")
    if problem := checked.fault(content, checked.EXPERIMENT):
        raise DataError(f"{path} is damaged: {clean(problem)}")
    return content


def _cell(home: Path, number: int, entry: Any) -> FoundRun:
    """A cell that experiment.json names; its own cell.json says how it ended."""
    wrong = checked.fault(entry, checked.CELL)
    if not wrong and not all(isinstance(entry.get(name), known) for name, known in NEEDED):
        wrong = "it has no folder or no axes"
    if wrong:
        place = f"cells[{number}]"
        told = f"its entry in {EXPERIMENT} is damaged: {clean(wrong)}"
        return FoundRun(home / place, place, UNREADABLE, told, summary={}, overrides={})
    folder = home / entry["folder"]
    about: Values = {"status": NOT_RUN, "reason": NOT_RUN}
    if not _is_below(folder, home):
        about = {"status": UNREADABLE, "reason": "its folder is not in that of the experiment"}
    elif (folder / CELL).exists():
        about = _json(folder / CELL) or {}
        if checked.fault(about, checked.STATE) or "status" not in about:
            about = {"status": UNREADABLE, "reason": f"{CELL} is damaged"}
    cell = FoundRun(
        folder,
        clean(entry["folder"]),
        str(about.get("status")),
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
    summary = _json(cell.folder / SUMMARY)
    problem = None
    if summary is None:
        problem = f"{SUMMARY} is missing or damaged"
    elif summary.get("format") != FORMAT:
        problem = f"its format is {summary.get('format')!r}, and this fedhet reads {FORMAT}"
    elif wrong := checked.summary_fault(summary):
        problem = f"{SUMMARY} is damaged: {clean(wrong)}"
    elif not _complete(summary):
        problem = f"{SUMMARY} is incomplete"
    if problem or summary is None:
        cell.status, cell.reason = UNREADABLE, problem
        return
    cell.summary = summary
    if summary["status"] == "ok":
        cell.status, cell.reason = FINISHED, None
    elif summary.get("reason") == RUNNING:
        cell.status, cell.reason = "interrupted", RUNNING
    else:
        cell.status = summary["status"]
        cell.reason = clean(str(summary.get("reason")))
    if cell.status == FAILED and has_diverged(cell.reason):
        cell.status = DIVERGED


def _complete(summary: Values) -> bool:
    """Whether the entries are there that every run has from its start, and from its end."""
    try:
        method_name(summary)
        needed = {"status", "partition", "seed"}
        needed |= {"models", "seconds", "bytes"} if summary["status"] == "ok" else set()
    except (KeyError, TypeError):
        return False
    return needed <= summary.keys() and isinstance(summary["partition"], dict)


def _json(path: Path) -> Values | None:
    """The object in the file; None if it is missing or damaged."""
    try:
        content = checked.load(path)
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


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
