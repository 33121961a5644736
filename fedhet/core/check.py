"""Checks of single settings.

Each check returns the value in its type, or raises a ConfigError that says what is allowed.
`Checked` is the base of classes of settings; it checks their fields. `installed` checks the
packages that a setting needs. The last functions return parts of messages.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, field, fields
from functools import partial
from importlib.metadata import distributions
from importlib.util import find_spec
from numbers import Integral, Real
from typing import Any, ClassVar, TypeVar

from fedhet.core.errors import ConfigError

T = TypeVar("T")
EXACT = 2**53  # floats, as files of scores hold them, are exact for whole numbers up to this one
# Far more than any training needs. A larger number would only keep a client busy for ever.
MOST_EPOCHS = 100_000
MOST_STEPS = 10**9
MOST_SAMPLES = 10**9


def number(
    name: str,
    value: object,
    *,
    low: float | None = None,
    high: float | None = None,
    open_low: float | None = None,
    open_high: float | None = None,
) -> float:
    """Return a finite number with low <= value <= high and open_low < value < open_high.

    Bounds that are None do not apply. A bool is not a number.
    """
    try:
        x = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:  # a whole number beyond the largest float
        x = math.inf
    above = (low is None or x >= low) and (open_low is None or x > open_low)
    below = (high is None or x <= high) and (open_high is None or x < open_high)
    if not math.isfinite(x) or not above or not below:
        raise _not_allowed(name, value, f"a number{_interval(low, high, open_low, open_high)}")
    return x


def integer(name: str, value: object, *, low: int | None = None, high: int | None = None) -> int:
    """Return a whole number in [low, high]. A bool and 3.0 are not whole numbers."""
    n = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
    if n is None or (low is not None and n < low) or (high is not None and n > high):
        raise _not_allowed(name, value, f"a whole number{_interval(low, high, None, None)}")
    return n


def boolean(name: str, value: object) -> bool:
    """Return true or false; 0, 1 and strings are refused."""
    if not isinstance(value, bool):
        raise _not_allowed(name, value, "true or false")
    return value


def text(name: str, value: object) -> str:
    """Return a string that is not empty."""
    if not isinstance(value, str) or not value:
        raise _not_allowed(name, value, "text")
    return value


def one_of(name: str, value: object, allowed: Iterable[str]) -> str:
    """Return one of the allowed words; the error suggests the closest ones."""
    words = tuple(allowed)
    if not isinstance(value, str) or value not in words:
        raise ConfigError(
            f"{name}={_as_written(value)} is not allowed{did_you_mean(str(value), words)};"
            f" choose from: {', '.join(words)}"
        )
    return value


def optional(check: Callable[..., T], name: str, value: object, **limits: float | None) -> T | None:
    """Return None, or a value that `check` allows.

    For example `optional(number, "client.clip", clip, open_low=0)`.
    """
    return unless((None,), check, name, value, **limits)  # type: ignore[no-any-return]


def unless(
    others: Sequence[object],
    check: Callable[..., T],
    name: str,
    value: object,
    **limits: float | None,
) -> Any:
    """Return a value that is one of `others`, or that `check` allows.

    For example `unless(["all"], integer, "method.p", p, low=1)`.
    """
    if value in others:
        return value
    try:
        return check(name, value, **limits)
    except ConfigError as error:
        raise ConfigError(f"{error}, or {' or '.join(map(_as_written, others))}") from error


def each(
    check: Callable[..., T], name: str, values: object, **limits: float | None
) -> tuple[T, ...]:
    """Apply `check` to every value of a list, and return the tuple of values.

    For example `each(integer, "model.hidden", hidden, low=1)`.
    """
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise _not_allowed(name, values, "a list")
    return tuple(check(f"{name}[{i}]", value, **limits) for i, value in enumerate(values))


def setting(
    default: Any = MISSING,
    *,
    name: str = "",
    low: float | None = None,
    high: float | None = None,
    open_low: float | None = None,
    open_high: float | None = None,
    allowed: Sequence[str] | None = None,
) -> Any:
    """Return a field of a `Checked` class.

    Args:
        default: its default; without a default, the field is required.
        name: the name that users write, if it is not <group>.<name of the field>.
        low, high: value >= low, and value <= high.
        open_low, open_high: value > open_low, and value < open_high; for float only.
        allowed: the allowed words, for a str.
    """
    limits = {
        "low": low,
        "high": high,
        "open_low": open_low,
        "open_high": open_high,
        "allowed": allowed,
    }
    given = {key: limit for key, limit in limits.items() if limit is not None}
    return field(default=default, metadata={"name": name, "limits": given})


_BY_TYPE: dict[str, Callable[..., object]] = {
    "bool": boolean,
    "int": integer,
    "float": number,
    "str": text,
}


class Checked:
    """Base of dataclasses of settings. It checks the values when an object is made.

    A field of type bool, int, float or str must have a value of this type, or null if its type ends
    with `| None`, within the limits that `setting` gives the field. The class itself checks fields
    of other types.
    """

    GROUP: ClassVar[str] = ""  # the prefix of the settings' names, as in client.lr

    def __post_init__(self) -> None:
        for each_field in fields(self):  # type: ignore[arg-type]
            written: Any = each_field.type  # a class, without `from __future__ import annotations`
            kind, _, other = str(getattr(written, "__name__", written)).partition(" | ")
            if kind not in _BY_TYPE or other not in ("", "None"):
                continue
            limits = each_field.metadata.get("limits", {})
            check = one_of if "allowed" in limits else _BY_TYPE[kind]
            prefix = f"{self.GROUP}." if self.GROUP else ""
            name = each_field.metadata.get("name") or f"{prefix}{each_field.name}"
            checked = partial(optional, check) if other else check
            value = checked(name, getattr(self, each_field.name), **limits)
            object.__setattr__(self, each_field.name, value)  # now a float if it was an int for one


def installed(what: str, *packages: str, extra: str | None) -> None:
    """Refuse a setting, or an option, if packages that it needs are not installed.

    Args:
        what: the setting or option, as the user gave it.
        packages: the names by which the packages are imported.
        extra: the extra of fedhet that installs them; None if no extra does.

    Raises:
        ConfigError: names the missing packages, and the command that installs them.
    """
    # W&B leaves a folder of its name in the working directory; such a folder has no origin.
    missing = [name for name in packages if not getattr(find_spec(name), "origin", None)]
    if missing:
        how = f"-e '.[{extra}]' in fedhet's folder" if extra else " ".join(missing)
        raise ConfigError(
            f"{what} needs {' and '.join(missing)}, which this Python does not have; install it"
            f" with: pip install {how}"
        )


def installed_versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Return the version of each package, or None for a package that is not installed."""
    return {name: next((d.version for d in distributions(name=name)), None) for name in packages}


def counted(n: int, noun: str, plural: str = "") -> str:
    """Return "1 client" or "2 clients"; with a plural, "1 class" or "2 classes"."""
    return f"{n} {noun if n == 1 else plural or noun + 's'}"


def did_you_mean(word: str, allowed: Iterable[str], certain: Iterable[str] = ()) -> str:
    """Return the hint " (did you mean a or b?)", or "" if nothing is similar to `word`.

    Args:
        word: the word that the user wrote.
        allowed: the words to compare it with.
        certain: suggestions that come first and need no similarity.
    """
    similar = difflib.get_close_matches(word, list(allowed), n=2)
    suggestions = list(dict.fromkeys([*certain, *similar]))[:3]
    return f" (did you mean {' or '.join(suggestions)}?)" if suggestions else ""


def _interval(
    low: float | None, high: float | None, open_low: float | None, open_high: float | None
) -> str:
    bounds = {">=": low, ">": open_low, "<=": high, "<": open_high}
    conditions = [f"{sign} {bound}" for sign, bound in bounds.items() if bound is not None]
    return f" {' and '.join(conditions)}" if conditions else ""


def _as_written(value: object) -> str:
    """Return the value as a user writes it on the command line and in YAML."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _not_allowed(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{name}={_as_written(value)} is not allowed; it must be {allowed}")
