"""Checks of single settings: each returns the value in its type or raises a ConfigError that says
what is allowed."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral, Real
from typing import TypeVar

from fedhet.errors import ConfigError

T = TypeVar("T")


def number(
    name: str,
    value: object,
    *,
    low: float | None = None,
    high: float | None = None,
    open_low: float | None = None,
    open_high: float | None = None,
) -> float:
    """A finite number with low <= value <= high and open_low < value < open_high, where given. A
    bool is not a number."""
    allowed = f"a number{_interval(low, high, open_low, open_high)}"
    if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value):
        raise _refused(name, value, allowed)
    x = float(value)
    inside = (low is None or x >= low) and (high is None or x <= high)
    if (
        not inside
        or (open_low is not None and x <= open_low)
        or (open_high is not None and x >= open_high)
    ):
        raise _refused(name, value, allowed)
    return x


def integer(name: str, value: object, *, low: int | None = None, high: int | None = None) -> int:
    """A whole number in [low, high]; neither a bool nor 3.0."""
    if (
        not isinstance(value, Integral)
        or isinstance(value, bool)
        or not _between(int(value), low, high)
    ):
        raise _refused(name, value, f"a whole number{_interval(low, high, None, None)}")
    return int(value)


def boolean(name: str, value: object) -> bool:
    """true or false, not 0, 1 or a string."""
    if not isinstance(value, bool):
        raise _refused(name, value, "true or false")
    return value


def text(name: str, value: object) -> str:
    """A string that is not empty."""
    if not isinstance(value, str) or not value:
        raise _refused(name, value, "text")
    return value


def one_of(name: str, value: object, allowed: Iterable[str]) -> str:
    """One of the allowed words; the error offers the nearest of them."""
    words = tuple(allowed)
    if not isinstance(value, str) or value not in words:
        raise ConfigError(
            f"{name}={_shown(value)} is not allowed{did_you_mean(str(value), words)}; choose from:"
            f" {', '.join(words)}"
        )
    return value


def optional(check: Callable[..., T], name: str, value: object, **limits: float | None) -> T | None:
    """None, or what `check` allows: `optional(number, "client.clip", clip, open_low=0)`."""
    if value is None:
        return None
    try:
        return check(name, value, **limits)
    except ConfigError as error:
        raise ConfigError(f"{error}, or null") from error


def each(
    check: Callable[..., T], name: str, values: object, **limits: float | None
) -> tuple[T, ...]:
    """What `check` allows, of every value in a list: `each(integer, "model.hidden", hidden,
    low=1)`."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise _refused(name, values, "a list")
    return tuple(check(f"{name}[{i}]", value, **limits) for i, value in enumerate(values))


def did_you_mean(word: str, allowed: Iterable[str], sure: Iterable[str] = ()) -> str:
    """The hint (did you mean a or b?) with the words in `sure`, then those of `allowed` that look
    like `word`; "" without any."""
    near = list(dict.fromkeys([*sure, *difflib.get_close_matches(word, list(allowed), n=2)]))[:3]
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _between(x: int, low: int | None, high: int | None) -> bool:
    return (low is None or x >= low) and (high is None or x <= high)


def _interval(
    low: float | None, high: float | None, open_low: float | None, open_high: float | None
) -> str:
    bounds = {">=": low, ">": open_low, "<=": high, "<": open_high}
    said = [f"{sign} {bound}" for sign, bound in bounds.items() if bound is not None]
    return f" {' and '.join(said)}" if said else ""


def _shown(value: object) -> str:
    """As it is written on the command line and in YAML."""
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}"
    )


def _refused(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{name}={_shown(value)} is not allowed; it must be {allowed}")
