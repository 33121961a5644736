"""Makes the runs of a table and reads its figures from their records."""

from __future__ import annotations

import io
import json
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/

import nearest_sample
import tables
import tasks

import fedhet
from fedhet.runs import config
from fedhet.runs.config.lines import key_of
from fedhet.runs.job import Job
from fedhet.runs.object_task import REPLACED

Record = dict[str, Any]
INFINITE = "NaN or infinite"
ATTACK = "attack/"  # the values of scripts/nearest_sample.py


@cache
def run(task: str | None, overrides: tuple[str, ...], seed: int) -> tuple[list[Record], Record]:
    """Run fedhet once; return the lines of its rounds.jsonl, and its summary.json.

    A run that diverges, or has too few clients for its settings, also returns them.

    Raises:
        RunFailed: the run failed for another reason.
    """
    print(f"{task or ''} {' '.join(overrides)} seed={seed}".strip(), file=sys.stderr, flush=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        redirect_stdout(io.StringIO()),
        redirect_stderr(io.StringIO()),
    ):
        lines = [*overrides, f"seed={seed}", f"hydra.run.dir={folder}/run"]
        given = None
        if task:
            given = getattr(tasks, task)(Job(config.compose(lines)).task)
            lines = [line for line in lines if key_of(line).partition(".")[0] not in REPLACED]
        try:
            home = fedhet.run(lines, task=given).dir
        except fedhet.RunFailed as error:
            if not any(cause in error.reason for cause in (INFINITE, "replies accepted")):
                raise
            home = Path(error.folder or "")
        rows = [json.loads(line) for line in (home / "rounds.jsonl").read_text().splitlines()]
        return rows, json.loads((home / "summary.json").read_text())


def look_up(value: str, rows: list[Record], summary: Record) -> float | str | None:
    """Return the value with this name (see tables.py) in a record; None if there is none."""
    key, at, where = value.partition("@")
    if at:
        phase, step = ("train", int(where)) if where.isdigit() else (where, None)
        found = [row for row in rows if row["phase"] == phase and step in (None, row["step"])]
        if not found and summary["status"] == "failed" and INFINITE in summary["reason"]:
            return tables.DIVERGED
        return found[-1].get(key) if found else None
    entry: Any = summary
    for part in key.split("/"):
        entry = entry.get(part) if isinstance(entry, dict) else None
    return sum(entry.values()) if isinstance(entry, dict) else entry


@cache
def attack(overrides: tuple[str, ...], seed: int) -> dict[str, float | None]:
    """Return the results of scripts/nearest_sample.py for the messages of a run."""
    print(f"attack on {' '.join(overrides)} seed={seed}", file=sys.stderr, flush=True)
    with redirect_stderr(io.StringIO()):
        return nearest_sample.measure([*overrides, f"seed={seed}"])


def found(cell: tables.Cell, seed: int) -> float | str | None:
    """Return the cell's value for this seed."""
    if cell.value.startswith(ATTACK):
        return attack(cell.overrides, seed)[cell.value.removeprefix(ATTACK)]
    return look_up(cell.value, *run(cell.task, cell.overrides, seed))


def measure(table: tables.Table) -> dict[str, tables.Values]:
    """Run everything that the table needs; return its figures by the cells' keys.

    Raises:
        SystemExit: no run of the table has a value of this name.
    """
    figures = {cell.key: [found(cell, seed) for seed in range(table.seeds)] for cell in table.cells}
    for value in {cell.value for cell in table.cells}:
        every = [figures[cell.key] for cell in table.cells if cell.value == value]
        if all(entry is None for values in every for entry in values):
            raise SystemExit(f"{table.file}: no run has the value {value!r}")
    return figures
