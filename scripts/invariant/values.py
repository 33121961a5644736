"""Reads the values of a run that are compared, and hashes them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import fedhet


def read(place: Path) -> dict[str, dict[str, Any]]:
    """Return the values of a run's frames: place -> column -> value.

    First come the steps, then the clients' scores, then the values of the whole run.
    """
    results = fedhet.results(str(place))
    found = {f"step {number}": row for number, row in enumerate(rows(results.rounds), start=1)}
    for row in rows(results.clients):
        value = row.pop("value", None)
        kind = " ".join(f"{row[key]}" for key in row if key not in ("folder", "seed", "round"))
        found.setdefault(f"clients, round {row['round']}", {})[kind] = value
    (run,) = rows(results.runs)
    return {**found, "run": {**run, "problems": len(results.problems)}}


def digest(values: dict[str, dict[str, Any]]) -> str:
    """Return a hash of the weights after each step, and of all scores of all clients."""
    hashes = [row["weights_sha256"] for place, row in values.items() if place.startswith("step")]
    scores = {place: row for place, row in values.items() if place.startswith("clients")}
    return hashlib.sha256(json.dumps([hashes, scores]).encode()).hexdigest()


def rows(frame: Any) -> list[dict[str, Any]]:
    """Return a frame's rows without their missing values, which are NaN or None."""
    return [
        {key: value for key, value in row.items() if value is not None and value == value}
        for row in frame.to_dict("records")
    ]
