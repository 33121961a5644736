"""Writes a run's progress to a file for Prometheus (the textfile collector of node_exporter).

The file is fedhet-server.prom in the folder of the environment variable FEDHET_METRICS_DIR. It is
replaced after each step. A run that is sent from another machine cannot name the folder.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedhet.core.errors import WriteError, clean, log
from fedhet.core.kinds import of_row
from fedhet.data.storage import written
from fedhet.runs.record.summary import sums

VARIABLE = "FEDHET_METRICS_DIR"
STATES = ("running", "ok", "failed", "interrupted")
_failed: set[str] = set()  # folders that cannot be written, as the log has said

# Pairs of labels and a value.
Values = Iterable[tuple[dict[str, str], float]]


def update(
    summary: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    failures: Sequence[Mapping[str, Any]],
    status: str,
) -> None:
    """Replace the file of the server, if FEDHET_METRICS_DIR is set.

    If the file cannot be written, a warning says so once, and the run continues.

    Args:
        summary: the content of summary.json so far.
        rows: the lines of rounds.jsonl so far.
        failures: the clients that have failed so far, including a step that ended the run.
        status: one of STATES.
    """
    folder = os.environ.get(VARIABLE)
    if not folder or folder in _failed:
        return
    try:
        with written(Path(folder) / "fedhet-server.prom") as part:
            part.write_text(text(summary, rows, failures, status), encoding="utf-8")
            part.chmod(0o644)  # despite the umask, because the collector is another user
    except WriteError as error:
        _failed.add(folder)
        log.warning("%s: %s", VARIABLE, error)


def text(
    summary: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    failures: Sequence[Mapping[str, Any]],
    status: str,
) -> str:
    """Return the content of the file, in Prometheus' text format; see `update`."""
    labels = {key: str(summary.get(key)) for key in ("method", "dataset", "model", "experiment")}
    last = rows[-1] if rows else {}
    cohort = len(last.get("cohort", ()))
    blocks = [
        block("run_info", "gauge", "the run, in the labels; always 1", [(labels, 1)]),
        block(
            "run_status",
            "gauge",
            "1 for the current state of the run, else 0",
            [({"status": state}, float(state == status)) for state in STATES],
        ),
        block("round", "gauge", "executed rounds", [({}, last.get("round", 0))]),
        block("rounds_planned", "gauge", "rounds of training", [({}, summary["rounds"])]),
        block("clients_asked", "gauge", "clients in the last step", [({}, cohort)]),
        block("score", "gauge", "the last scores; a larger one is better", _scores(rows)),
        block("loss", "gauge", "the last loss on the global test set", _last(rows, "loss_global")),
        block(
            "seconds_total",
            "counter",
            "seconds by part of the run",
            [
                ({"part": part}, value)
                for part, value in sums([row["seconds"] for row in rows]).items()
            ],
        ),
        block(
            "bytes_total",
            "counter",
            "bytes to and from clients by kind",
            [
                ({"direction": way, "kind": kind}, value)
                for way in ("up", "down")
                for kind, value in sums([row["bytes"][way] for row in rows]).items()
            ],
        ),
        block(
            "failures_total",
            "counter",
            "unused replies of clients by reason",
            [
                ({"reason": reason}, count)
                for reason, count in Counter(each["reason"] for each in failures).items()
            ],
        ),
    ]
    return "".join(blocks)


def _last(rows: Sequence[Mapping[str, Any]], key: str, **labels: str) -> Values:
    """Return the last value of a column that is not None; empty if there is none."""
    values = [row[key] for row in rows if row.get(key) is not None]
    return [(labels, values[-1])] if values else []


def _scores(rows: Sequence[Mapping[str, Any]]) -> Values:
    """Return the main score of the global model, and of the clients on their own test data."""
    if not rows or not (target := of_row(rows[-1])).score():
        return []
    return [
        value
        for where, key in {"global": target.key("global"), "clients": target.clients_key()}.items()
        for value in _last(rows, key, score=target.score(), on=where)
    ]


def block(name: str, kind: str, help: str, values: Values) -> str:
    """Return the lines of a metric with its head; "" if it has no values."""
    lines = [f"fedhet_{name}{_labels(labels)} {float(value)!r}\n" for labels, value in values]
    if not lines:
        return ""
    return f"# HELP fedhet_{name} {help}\n# TYPE fedhet_{name} {kind}\n{''.join(lines)}"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    escaped = (
        (name, clean(value).replace("\\", r"\\").replace('"', r"\""))
        for name, value in labels.items()
    )
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped) + "}"
