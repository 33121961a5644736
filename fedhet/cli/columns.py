"""Text and tables of two columns for --help and --list."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

WIDTH = 100


def columns(rows: Sequence[tuple[str, str]]) -> str:
    """Return two columns; the second is wrapped at WIDTH."""
    indent = max(len(name) for name, _ in rows) + 4
    return "\n".join(
        wrapped(f"  {name}".ljust(indent) + text, following=" " * indent) for name, text in rows
    )


def wrapped(text: str, first: str = "", following: str = "  ") -> str:
    """Return the text wrapped at WIDTH; a bound such as ">= 1" stays in one line.

    Args:
        text: the text.
        first: the beginning of the first line.
        following: the beginning of the others.
    """
    lines = textwrap.fill(
        first + re.sub(r"([<>]=?) ", "\\1\0", text),
        WIDTH,
        subsequent_indent=following,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines.replace("\0", " ")
