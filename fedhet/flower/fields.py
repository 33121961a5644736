"""Checks of single fields of a header that comes from another process."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fedhet.core.check import EXACT
from fedhet.core.errors import ConfigError, Rejected, clean
from fedhet.core.messages import LocalSettings

LONGEST_INTEGER = 2**62
MOST_METRICS = 1000
LONGEST_NAME = 200


def read(header: Mapping[str, Any], name: str, kind: type[Any], low: int | None = None) -> Any:
    """The field `name`, which must be exactly of this type and, if it is an int, at least `low`.

    Raises:
        Rejected: it is missing, of another type, or out of range.
    """
    value: Any = header.get(name)
    if type(value) is not kind:
        raise Rejected("unreadable", f"{name} in the header is no {kind.__name__}")
    if low is not None and not low <= value <= LONGEST_INTEGER:
        raise Rejected("unreadable", f"{name} in the header is {clean(repr(value), 50)}")
    return value


def number(value: Any) -> float | int | None:
    """The value if it is a number that is exactly a float and not NaN, else None."""
    if type(value) is int:
        return value if abs(value) <= EXACT else None
    return value if type(value) is float and not math.isnan(value) else None


def seconds(value: Any) -> float | None:
    """A positive number of seconds, or None for no limit.

    Raises:
        Rejected: it is neither.
    """
    size = number(value)
    if value is not None and (size is None or not 0 < size < math.inf):
        raise Rejected("unreadable", f"the deadline is {clean(repr(value), 50)}")
    return size


def run_id(value: Any) -> str:
    """What identifies a run: 32 hexadecimal digits, which may name a folder.

    Raises:
        Rejected: it is something else.
    """
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{32}", value):
        raise Rejected("unreadable", f"the run_id is {clean(repr(value), 50)}")
    return value


def metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """Metrics by name. They may be infinite, but not NaN.

    Raises:
        Rejected: there are too many, or one of them is no such number.
    """
    if len(values) > MOST_METRICS:
        raise Rejected("wrong content", f"{len(values)} metrics; at most {MOST_METRICS} are read")
    for name, value in values.items():
        if len(name) > LONGEST_NAME or not name.isprintable():
            raise Rejected("wrong content", f"the name of a metric is {clean(name, 50)!r}")
        if type(value) is not bool and number(value) is None:
            shown = clean(repr(value), 50)
            raise Rejected("wrong content", f"metric {name!r} is {shown}; a number is expected")
    return dict(values)


def local_settings(values: Mapping[str, Any]) -> LocalSettings:
    """The settings of local training.

    Raises:
        Rejected: one is missing, unknown, of another type or out of range.
    """
    names = {entry.name for entry in fields(LocalSettings)}
    if set(values) != names:
        raise Rejected("unreadable", f"the settings of local training are not {sorted(names)}")
    try:
        return LocalSettings(**values)
    except ConfigError as error:
        raise Rejected("unreadable", clean(f"local training: {error}")) from error
