"""The errors that a user can meet; every other exception is a bug."""

from __future__ import annotations

import os


class ConfigError(ValueError):
    """A setting is unknown, out of range, or contradicts another one.

    The message says what is allowed.
    """


class UnknownChoice(ConfigError):
    """A group has no choice of this name on this machine."""


class DataError(ValueError):
    """A data file is missing or damaged.

    The message names the file and says what was expected.
    """


class WriteError(OSError):
    """A file cannot be written, for example because the disk is full.

    The message names the file, its folder and the cause.
    """


class RunFailed(RuntimeError):
    """A run ended with status "failed".

    Attributes:
        reason: why it failed, in one line.
        folder: the run folder, or None if the run failed before it had one.
    """

    def __init__(self, reason: str, folder: str | None = None) -> None:
        super().__init__(reason if folder is None else f"{reason} (run folder: {folder})")
        self.reason = reason
        self.folder = folder

    def __reduce__(self) -> tuple[type[RunFailed], tuple[str, str | None]]:
        # Keeps both attributes when a launcher sends the exception from another process.
        return RunFailed, (self.reason, self.folder)


class LostState(ValueError):
    """What a client remembers is missing or damaged at its site."""


class Rejected(ValueError):
    """A message from another process that is refused as a whole.

    Attributes:
        reason: the kind of fault, under which it is counted: "unreadable", "too large", "replayed",
            "corrupt", "wrong content".
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def traceback_wanted() -> bool:
    """Whether the user asks for tracebacks, by FEDHET_TRACEBACK=1 in the environment."""
    return os.environ.get("FEDHET_TRACEBACK") == "1"


def uncreatable(setting: str, folder: object, error: OSError) -> ConfigError:
    """The error to raise where the run folder, which `setting` names, cannot be used."""
    return ConfigError(
        f"{setting}: the folder {folder} cannot be created, or not be written to: {error.strerror}"
    )


def reason_of(error: BaseException) -> str:
    """Why a run failed, in one line: for its user, and for its record."""
    if isinstance(error, RunFailed):
        return error.reason
    if isinstance(error, ConfigError | DataError | WriteError):
        return str(error)
    return f"{type(error).__name__}: {error}"
