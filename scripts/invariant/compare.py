"""What of two trees' results must be equal, and where they are not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

# Named is what may differ, and everything else is compared: if a column is renamed or a new one is
# measured, that is reported, and somebody decides. From a list of what is compared, a renamed
# column would silently drop out.
IGNORED = re.compile(
    r"folder|run_dir|experiment|format|reason"  # where a run lies, and in which words it ended
    r"|(.+\.)?(seconds|bytes|megabytes|memory)(\..+)?"  # what it costs
    r"|client_state\.largest|communication\.cost"  # bytes by another name
)


def difference(old: dict[str, Any], new: dict[str, Any]) -> str | None:
    """Say where two results of one configuration differ first, and in how many values.

    Args:
        old: the result at BASE, as child.py has written it.
        new: that of the working tree.
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
    if isinstance(value, list):  # a step's failures: who failed and how, not in which words
        value = [{**one, "cause": ""} if isinstance(one, dict) else one for one in value]
    # The shortest text that reads back as the same float, so every bit counts.
    return json.dumps(value)


def _round(row: dict[str, Any]) -> str:
    return f" ({row['phase']}, round {row['round']})" if {"phase", "round"} <= row.keys() else ""
