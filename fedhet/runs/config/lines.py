"""Reads overrides `key=value` as text, without Hydra's parser."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from fedhet.core.errors import ConfigError

_BLANKS = re.compile(r"^([\w./@]+)(?:\s+=\s*|=\s+)([^\s=-][^=\n]*)$", re.MULTILINE)


def key_of(line: str) -> str:
    """Return the key of an override, without the + or ~ that may stand before it."""
    return line.lstrip("+~").partition("=")[0]


def value_of(line: str) -> str:
    """Return the text after the first = of an override."""
    return line.partition("=")[2]


def by_key(lines: Iterable[str]) -> dict[str, str]:
    """Return key -> override; the last override of a key counts."""
    return {key_of(line): line for line in lines}


def refuse_blanks(words: Sequence[str]) -> None:
    """Refuse blanks around the =, as in `rounds = 5`, which a shell splits into three words.

    Raises:
        ConfigError: there are such blanks; the message says how to write the setting.
    """
    if found := _BLANKS.search("\n".join(words)):
        raise ConfigError(
            f"cannot read '{' '.join(found[0].split())}': a setting has no blanks around the =;"
            f" write {found[1]}={found[2]}"
        )


def refuse_repeated(lines: Sequence[str]) -> None:
    """Refuse a key that is given twice, because only the last override would count.

    Raises:
        ConfigError: a key is given twice; the message names both overrides.
    """
    given: dict[str, str] = {}
    for line in lines:
        if (key := key_of(line)) in given:
            raise ConfigError(
                f"{key} is given twice, by {given[key]} and {line}; leave one out, or run both by"
                f" -m {key}=<one>,<other>"
            )
        given[key] = line
