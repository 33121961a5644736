"""Loops over cases inside one test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def named_case(*case: Any) -> Iterator[None]:
    """Add to what fails inside in which case of the loop it failed."""
    try:
        yield
    except BaseException as err:
        err.add_note(f"case: {', '.join(map(str, case))}")
        raise
