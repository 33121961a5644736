"""How a command ends: with one line on stderr and an exit code after an error, and on Ctrl-C."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from fedhet.core import interruptions
from fedhet.core.errors import (
    ConfigError,
    DataError,
    RunFailed,
    WriteError,
    reason_of,
    traceback_wanted,
)

# If one of these is missing, this Python is not the one into which fedhet was installed.
_ESSENTIAL = ("omegaconf", "hydra", "yaml", "numpy", "torch", "flwr", "rich", "safetensors")

PROGRAM = "python -m fedhet"
FAILED = 1
WRONG_USE = 2
DEGRADED = 3
INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """A parser that reports errors as fedhet does: in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments") and self.prog == PROGRAM:
            message += "; a setting has no dashes, as in rounds=5"
        raise ConfigError(f"{message}; see {self.prog} --help")


Arguments = dict[str, dict[str, Any]]  # argument -> what add_argument takes
Call = Callable[[argparse.Namespace], int | None]


def subcommand(
    prog: str,
    about: str | None,
    table: Mapping[str, tuple[Call | None, str | None, Arguments]],
    argv: Sequence[str],
) -> int:
    """Run the command that the first argument names, and return its exit code.

    Args:
        prog: the words before the command's name.
        about: the purpose of all commands.
        table: name -> the function that runs the command, a text that begins with a summary, and
            the arguments.
        argv: the command's name and its arguments.

    Raises:
        ConfigError: an argument is wrong. The command may raise other errors.
    """
    parser = Parser(prog=prog, description=about)
    commands = parser.add_subparsers(metavar="command", required=True)
    for name, (call, text, arguments) in table.items():
        summary = (text or "").partition("\n")[0]
        command = commands.add_parser(name, help=summary, description=summary)
        command.set_defaults(call=call)
        for argument, options in arguments.items():
            command.add_argument(argument, **options)
    if not argv or argv[0] not in commands.choices:
        parser.parse_args(argv)  # prints the help, or raises
    # Overrides may stand before and after an option; a parser with subcommands cannot parse that.
    args = commands.choices[argv[0]].parse_intermixed_args(argv[1:])
    return args.call(args) or 0


def drop_output() -> None:
    """Discard further output, because its reader has left, as in `--list | head`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it at exit


def say(text: str) -> None:
    """Print a line to stdout, unless its reader has left."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        drop_output()


def report_error(error: Exception) -> int:
    """Print the error and return its exit code; FEDHET_TRACEBACK=1 also prints the traceback."""
    if traceback_wanted():
        traceback.print_exception(error)
    print(f"error: {error_line(error)}", file=sys.stderr, flush=True)
    return WRONG_USE if isinstance(error, ConfigError | DataError) else FAILED


def error_line(error: Exception) -> str:
    """Return the line that the user reads about the error."""
    if isinstance(error, RunFailed | ConfigError | DataError | WriteError):
        return reason_of(error)
    if isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] in _ESSENTIAL:
        return (
            f"{error.name} is not installed in {sys.executable}: activate fedhet's environment"
            " (`source .venv/bin/activate`, after `make run`), or install fedhet into this Python"
            " (`pip install -e .`)"
        )
    return f"{reason_of(error)} (FEDHET_TRACEBACK=1 shows where)"


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM act like Ctrl-C inside the block, and make sure that neither is lost.

    Python drops a KeyboardInterrupt in a `__del__`, in the callback of a weak reference (every
    import has one), and in the start of many C extensions. `raise_if_interrupted` raises it again.
    A library that is interrupted halfway may raise another error instead.

    Raises:
        KeyboardInterrupt: the block has raised an error after a signal.
    """
    handlers = {signal.SIGTERM: signal.signal(signal.SIGTERM, interruptions.interrupt)}
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as for a script's background job
        handlers[signal.SIGINT] = signal.signal(signal.SIGINT, interruptions.interrupt)
    report = sys.unraisablehook

    def report_others(dropped: sys.UnraisableHookArgs) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            report(dropped)

    sys.unraisablehook = report_others
    try:
        with interruptions.signals_noted():
            try:
                yield
            except Exception:
                interruptions.raise_if_interrupted()
                raise
    finally:
        sys.unraisablehook = report
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
