"""Overrides as text: what can be told of `key=value` without Hydra's parser."""

from __future__ import annotations

from collections.abc import Iterable


def key_of(line: str) -> str:
    """Return the key of an override, without the + or ~ that may stand before it."""
    return line.lstrip("+~").partition("=")[0]


def value_of(line: str) -> str:
    """Return the text after the first = of an override."""
    return line.partition("=")[2]


def by_key(lines: Iterable[str]) -> dict[str, str]:
    """Return key -> override; of several overrides of a key the last one, which counts."""
    return {key_of(line): line for line in lines}
