"""Whether the records in a folder have the form that a report reads: they may come from anyone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedhet.core.targets import TARGETS, Classes

Check = Callable[[Any], bool]
LARGEST = 10**300  # whole numbers beyond it are no floats


def load(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def fault(content: Any, checks: Mapping[str, Check]) -> str | None:
    """The first entry that has not its form, with its value; None if all have theirs.

    Entries that are missing or null have it.
    """
    if not isinstance(content, dict):
        return f"it is {_shown(content)}, and no object"
    for name, check in checks.items():
        value = content.get(name)
        if value is not None and not check(value):
            return f"{name} is {_shown(value)}"
    return None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


# ---- forms
def is_text(value: Any) -> bool:
    """Whether it is text."""
    return isinstance(value, str)


def is_number(value: Any) -> bool:
    """Whether it is a number; NaN and infinity, which JSON files may have, are."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) < LARGEST


def is_count(value: Any) -> bool:
    """Whether it is a whole number."""
    return isinstance(value, int) and is_number(value)


def is_scalar(value: Any) -> bool:
    """Whether it is text, a number, true or false."""
    return isinstance(value, str | bool) or is_number(value)


def list_of(check: Check) -> Check:
    """A list whose items have this form."""
    return lambda value: isinstance(value, list) and all(map(check, value))


def object_of(check: Check) -> Check:
    """An object whose values have this form, or are null."""
    return lambda value: (
        isinstance(value, dict) and all(v is None or check(v) for v in value.values())
    )


def object_with(**checks: Check) -> Check:
    """An object with entries of these forms."""
    return lambda value: fault(value, checks) is None


def is_table(value: Any) -> bool:
    """Whether it is a list of equally long lists of numbers."""
    return list_of(list_of(is_number))(value) and len({len(row) for row in value}) < 2


def is_label(value: Any) -> bool:
    """Whether it is the value of an axis: a scalar, or a list or an object of them."""
    return value is None or is_scalar(value) or list_of(is_label)(value) or _is_object(value)


_is_object = object_of(is_label)
_numbers = object_of(is_number)
_labels = list_of(is_label)
TUNED = {
    "axes": _is_object,
    "chosen": _is_object,
    "validation": is_number,
    "at_the_edge": list_of(is_text),
}
EXPERIMENT: dict[str, Check] = {
    "axes": object_of(_labels),
    "cells": lambda value: isinstance(value, list),
    "experiment": is_text,
    "title": is_text,
    "digest": is_text,
    "fixed": list_of(is_text),
    "command": list_of(is_text),
    "tune": object_with(space=_is_object, own=object_of(_is_object)),
    "tuned": list_of(object_with(**TUNED)),
    "report": object_with(
        compare=is_text, metric=is_text, reference=is_scalar, notes=list_of(is_text)
    ),
}
CELL: dict[str, Check] = {
    "folder": is_text,
    "kind": is_text,
    "axes": _is_object,
    "tuned": _is_object,
    "overrides": list_of(is_text),
}
STATE: dict[str, Check] = {
    "status": is_text,
    "reason": is_text,
    "code": object_of(is_scalar),
}


def _is_target(value: Any) -> bool:
    """A score with the value that was wanted, then what it took to reach it."""
    return isinstance(value, dict) and bool(value) and all(map(is_number, _known(value)))


def _is_phase(value: Any) -> bool:
    return isinstance(value, dict) and is_text(value.get("name")) and is_count(value.get("rounds"))


def _known(value: Mapping[str, Any]) -> list[Any]:
    first, *rest = value.values()
    return [first, *(item for item in rest if item is not None)]


SUMMARY: dict[str, Check] = {
    **dict.fromkeys(("status", "reason", "method", "server_opt", "merge"), is_text),
    **dict.fromkeys(("dataset", "model", "target", "score"), is_text),
    **dict.fromkeys(("plugins", "models"), list_of(is_text)),
    **dict.fromkeys(("seed", "rounds"), is_count),
    **dict.fromkeys(("loss", "validation"), is_number),
    **dict.fromkeys(("seconds", "memory", "client_state"), _numbers),
    **dict.fromkeys(("personal", "finetuned"), _numbers),
    "bytes": object_of(_numbers),
    "partition": lambda value: isinstance(value, dict),
    "failures": lambda value: isinstance(value, list),
    "targets": list_of(_is_target),
    "phases": list_of(_is_phase),
}


def summary_fault(summary: Mapping[str, Any]) -> str | None:
    """What of a summary.json has not its form, if anything."""
    checks = dict(SUMMARY)
    # The scores of each kind of target have names of their own.
    target = TARGETS.get(str(summary.get("target", Classes.name)), Classes)
    if target.keys:
        checks |= {target.score(): _numbers, target.key("last_k"): _numbers}
        checks |= dict.fromkeys(
            (target.clients_key(), target.key("clients_worst_decile")), is_number
        )
    return fault(summary, checks)


def step_fault(step: Any) -> str | None:
    """What of a line of rounds.jsonl has not its form, if anything."""
    checks: dict[str, Check] = {"phase": is_text, "seconds": _numbers, "bytes": object_of(_numbers)}
    checks |= {
        name: is_number
        for name in (step if isinstance(step, dict) else ())
        if name.startswith(("acc_", "loss_")) or name in ("step", "round")
    }
    return fault(step, checks)
