"""Compares the results of two trees, and says where they differ."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

# The columns that may differ; all others are compared. So a renamed or new column is reported, and
# a person decides. If this were a list of the compared columns, a renamed column would silently
# drop out.
IGNORED = re.compile(
    r"folder|run_dir|experiment|format|reason"  # where a run lies, and the words of its reason
    r"|(.+\.)?(seconds|bytes|megabytes|memory)(\..+)?"  # the cost of a run
    r"|client_state\.largest|communication\.cost"  # bytes by another name
)


def difference(old: dict[str, Any], new: dict[str, Any]) -> str | None:
    """Say where two results of one configuration differ first, and in how many values.

    Args:
        old: the result of BASE, from child.py.
        new: the result of the working tree.
    """
    if old["ended"] != new["ended"]:
        return f"{_outcome(old)} -> {_outcome(new)}"
    found = [*_differing(old["values"], new["values"])]
    if not found:
        return None
    place, column, was, now = found[0]
    more = f" (and {len(found) - 1} more values)" if found[1:] else ""
    return f"{place}, {column}: {was} -> {now}{more}"


def _outcome(result: dict[str, Any]) -> str:
    return f"{result['ended']} ({result['reason']})" if result["reason"] else result["ended"]


def _differing(
    old: dict[str, dict[str, Any]], new: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, str, str, str]]:
    for place in dict.fromkeys([*old, *new]):
        before, after = old.get(place, {}), new.get(place, {})
        for column in dict.fromkeys([*before, *after]):
            was, now = _text(before, column), _text(after, column)
            if was != now and not IGNORED.fullmatch(column):
                yield f"{place}{_round(before or after)}", column, was, now


def _text(row: dict[str, Any], column: str) -> str:
    if column not in row:
        return "absent"
    value = row[column]
    if isinstance(value, list):  # a step's failures: compare who failed and how, not the words
        value = [{**item, "cause": ""} if isinstance(item, dict) else item for item in value]
    # The shortest text that reads back as the same float, so every bit counts.
    return json.dumps(value)


def _round(row: dict[str, Any]) -> str:
    return f" ({row['phase']}, round {row['round']})" if {"phase", "round"} <= row.keys() else ""
