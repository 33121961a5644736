"""The log, and the errors that a user can see; every other exception is a bug."""

from __future__ import annotations

import logging
import os
import re

log = logging.getLogger("fedhet")
LONGEST_CAUSE = 1000  # characters of a text from another process in a log or record
LONGEST_REASON = 10_000  # characters of an error text that may contain several causes
_DECORATION = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\u2500-\u259f]")  # ANSI codes and frames


def clean(text: str, limit: int = LONGEST_CAUSE) -> str:
    """Cut the text after `limit` characters, and return it in one line.

    Control characters are escaped. A text from another process could otherwise forge lines of the
    log, or control the terminal. The escapes, and the note after a cut, add to the length.
    """
    short = text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in short)


def printed(text: str) -> str:
    """Join another program's terminal output into one line, without colours and frames."""
    return clean(" ".join(_DECORATION.sub(" ", text).split()))


class ConfigError(ValueError):
    """A setting is unknown, out of range, or contradicts another one.

    The message says what is allowed.
    """


class UnknownChoice(ConfigError):
    """A configuration group has no choice of this name on this machine."""


class OtherCode(ConfigError):
    """The code differs from the code with which the experiment began."""


class MachineError(ConfigError):
    """A ConfigError with a message that must not leave this machine.

    The message names a file or a folder of this machine, has a value of the data, or repeats an
    error of code that is not fedhet's.
    """


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
    """The state of a client is missing or damaged at its site."""


class Rejected(ValueError):
    """A message from another process is refused as a whole.

    Attributes:
        reason: the kind of fault under which the failure is counted: "unreadable", "too large",
            "replayed", "corrupt", "wrong content".
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(clean(message))
        self.reason = reason


def has_diverged(reason: str | None) -> bool:
    """Whether a run failed because of numbers that are not finite, or far too large.

    Such a number is an entry of a tensor that is NaN, infinite or beyond `trees.LARGEST`; or a
    client's score or loss that is NaN, or infinite although it must be finite.

    Args:
        reason: why the run failed, as in summary.json.
    """
    # `check_scores` in server/evaluation.py writes "; allowed for n". Older records have ", which".
    return (
        re.search(r"NaN or infinite values|is (nan|-?inf)(, which|; allowed for n)", reason or "")
        is not None
    )


# The environment variable that engine=flwr sets, to a file with the run's settings, for a run that
# it submits to this machine. Such a run writes its failure into its own record, so Flower need not
# report it.
SUBMITTED = "FEDHET_SUBMITTED"


def traceback_wanted() -> bool:
    """Whether the user set FEDHET_TRACEBACK=1 in the environment to get tracebacks."""
    return os.environ.get("FEDHET_TRACEBACK") == "1"


def uncreatable(setting: str, folder: object, error: OSError) -> ConfigError:
    """Build the error to raise if the run folder that `setting` names cannot be used."""
    return ConfigError(
        f"{setting}: the folder {folder} cannot be created or written to: {error.strerror}"
    )


def public_text(error: Exception) -> str:
    """Return the text of an error for another machine.

    For a ConfigError, Rejected or LostState, this is the full text, because the text contains only
    what the run itself has sent. For a MachineError, and for any other error, this is only the
    class name, because the text may have values of samples or paths of this machine. The log of
    this machine has the full text. If this machine submitted the run to itself, the full text is
    always returned.
    """
    name = type(error).__name__
    ours = isinstance(error, ConfigError | Rejected | LostState)
    if SUBMITTED in os.environ or (ours and not isinstance(error, MachineError)):
        return f"{name}: {error}"
    return f"{name}; the log on that node has the details"


def reason_of(error: BaseException) -> str:
    """Return why a run failed, in one line, for its user and for its record."""
    if isinstance(error, RunFailed):
        reason = error.reason
    elif isinstance(error, ConfigError | DataError | WriteError):
        reason = str(error)
    else:
        reason = f"{type(error).__name__}: {error}"
    return clean(reason, LONGEST_REASON)
