"""A run's progress as a text file for Prometheus, for the textfile collector of node_exporter.

The file is that of the environment variable FEDHET_METRICS_FILE, which should end in .prom. It is
replaced after each step; a run that is sent from another machine cannot name it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedhet.errors import WriteError, clean
from fedhet.record.files import write_text
from fedhet.targets.table import of_row

log = logging.getLogger("fedhet")
VARIABLE = "FEDHET_METRICS_FILE"
STATES = ("running", "ok", "failed", "interrupted")
_failed: set[str] = set()  # files of which the log has said that they cannot be written

# Pairs of labels and a value.
Values = Iterable[tuple[dict[str, str], float]]


def update(summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], status: str) -> None:
    """Replace the file, if there is to be one.

    One that cannot be written is reported once; the run goes on without it.

    Args:
        summary: the content of summary.json so far.
        rows: the lines of rounds.jsonl so far.
        status: one of STATES.
    """
    file = os.environ.get(VARIABLE)
    if not file or file in _failed:
        return
    try:
        write_text(Path(file), text(summary, rows, status))
    except WriteError as error:
        _failed.add(file)
        log.warning("%s=%s: %s", VARIABLE, file, error)


def text(summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], status: str) -> str:
    """The content of the file, in Prometheus' text format."""
    failures: dict[str, float] = {}
    sent: dict[tuple[str, str], float] = {}
    seconds: dict[str, float] = {}
    for row in rows:
        for failure in row["failures"]:
            failures[failure["reason"]] = failures.get(failure["reason"], 0) + 1
        for part, value in row["seconds"].items():
            seconds[part] = seconds.get(part, 0) + value
        for way, kinds in row["bytes"].items():
            for kind, value in kinds.items():
                sent[way, kind] = sent.get((way, kind), 0) + value
    about = {key: str(summary.get(key)) for key in ("method", "dataset", "model", "experiment")}
    last = rows[-1] if rows else {}
    cohort = len(last.get("cohort", ()))
    blocks = [
        _block("run_info", "gauge", "what runs; always 1", [(about, 1)]),
        _block("run_status", "gauge", "1 for the state of the run", _one_of(status)),
        _block("round", "gauge", "executed rounds", [({}, last.get("round", 0))]),
        _block("rounds_planned", "gauge", "rounds of training", [({}, summary["rounds"])]),
        _block("clients_asked", "gauge", "clients in the last step", [({}, cohort)]),
        _block("score", "gauge", "the last scores; a larger one is better", _scores(rows)),
        _block("loss", "gauge", "the last loss on the global test set", _last(rows, "loss_global")),
        _block(
            "seconds_total",
            "counter",
            "seconds by what they were spent on",
            [({"part": part}, value) for part, value in seconds.items()],
        ),
        _block(
            "bytes_total",
            "counter",
            "bytes to and from clients by kind",
            [({"direction": way, "kind": kind}, value) for (way, kind), value in sent.items()],
        ),
        _block(
            "failures_total",
            "counter",
            "replies of clients that were not used, by reason",
            [({"reason": reason}, value) for reason, value in failures.items()],
        ),
    ]
    return "".join(blocks)


def _one_of(status: str) -> Values:
    return [({"status": state}, float(state == status)) for state in STATES]


def _last(rows: Sequence[Mapping[str, Any]], key: str, **labels: str) -> Values:
    """The last value that is known."""
    values = [row[key] for row in rows if row.get(key) is not None]
    return [(labels, values[-1])] if values else []


def _scores(rows: Sequence[Mapping[str, Any]]) -> Values:
    """The deciding score of the global model, and of the clients on their own test data."""
    if not rows or not (target := of_row(rows[-1])).score():
        return []
    keys = {"global": target.key("global"), "clients": target.clients_key()}
    return [
        value
        for where, key in keys.items()
        for value in _last(rows, key, score=target.score(), on=where)
    ]


def _block(name: str, kind: str, help: str, values: Values) -> str:
    """A metric with its head; nothing for one that has no values."""
    lines = [f"fedhet_{name}{_labels(labels)} {_value(value)}\n" for labels, value in values]
    if not lines:
        return ""
    return f"# HELP fedhet_{name} {help}\n# TYPE fedhet_{name} {kind}\n{''.join(lines)}"


def _value(value: float) -> str:
    """A number as Prometheus reads it; it knows NaN, Inf and -Inf as Python writes them."""
    return repr(float(value))


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    escaped = (
        (name, clean(value).replace("\\", r"\\").replace('"', r"\""))
        for name, value in labels.items()
    )
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped) + "}"
