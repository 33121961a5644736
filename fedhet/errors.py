"""The errors a user can meet; every other exception is a bug."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting is unknown, out of range or does not fit the others. The message says what is
    allowed."""


class DataError(ValueError):
    """A data file is missing or damaged. The message names the file and what was expected."""


class RunFailed(RuntimeError):
    """A run ended with status "failed"; `reason` says why, `folder` is where its record lies."""

    def __init__(self, reason: str, folder: str | None = None) -> None:
        super().__init__(reason if folder is None else f"{reason} (run folder: {folder})")
        self.reason, self.folder = reason, folder

    def __reduce__(self) -> tuple[type[RunFailed], tuple[str, str | None]]:
        return RunFailed, (self.reason, self.folder)  # whole, also from a launcher's other process
