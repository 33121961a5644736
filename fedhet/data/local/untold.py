"""Errors at a site: where they are, and which of them no other machine learns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fedhet.core.errors import ConfigError, DataError


class UntoldError(DataError):
    """An error whose message may have values of samples or names of files, which stay here."""


@contextmanager
def located(where: str) -> Iterator[None]:
    """Let errors begin with the place; a setting that data contradict is an error of the data."""
    try:
        yield
    except (ConfigError, DataError) as error:
        kind = UntoldError if isinstance(error, UntoldError) else DataError
        raise kind(f"{where}: {error}") from error


@contextmanager
def untold() -> Iterator[None]:
    """Let errors about data be such that are not told."""
    try:
        yield
    except (DataError, OSError) as error:
        raise UntoldError(str(error)) from error
