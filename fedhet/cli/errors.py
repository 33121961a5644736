"""How errors appear on the command line: one line on stderr, and an exit code."""

from __future__ import annotations

import os
import sys
import traceback

from fedhet.errors import ConfigError, DataError, RunFailed

FAILED = 1
WRONG_USE = 2
DEGRADED = 3
INTERRUPTED = 130


def report_error(error: Exception) -> int:
    """Print the error and return its exit code; FEDHET_TRACEBACK=1 also prints the traceback."""
    if os.environ.get("FEDHET_TRACEBACK") == "1":
        traceback.print_exception(error)
    print(f"error: {error_line(error)}", file=sys.stderr, flush=True)
    return WRONG_USE if isinstance(error, ConfigError | DataError) else FAILED


def error_line(error: Exception) -> str:
    """Return the error as the user should read it, in one line."""
    if isinstance(error, RunFailed):
        return error.reason
    if isinstance(error, ConfigError | DataError):
        return str(error)
    return f"{type(error).__name__}: {error} (FEDHET_TRACEBACK=1 shows where)"
