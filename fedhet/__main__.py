"""`python -m fedhet`, which is also the console script `fedhet`: help, commands, and runs.

Exit codes: 0 success, 1 a run failed, 2 a wrong setting or missing data, 3 a
run that has lost more replies than it was allowed, 130 interrupted by Ctrl-C
or SIGTERM.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036 -- says so before anything fails
    sys.exit("error: fedhet needs Python 3.11 or newer; " + sys.executable + " is older")

import argparse
import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

try:
    from fedhet.core.errors import ConfigError
    from fedhet.runs.cli import help
    from fedhet.runs.cli.combinations import compatibility
    from fedhet.runs.cli.commands import Command, commands, is_command, run_command
    from fedhet.runs.cli.exits import INTERRUPTED, PROGRAM, Parser, drop_output, report_error
    from fedhet.runs.cli.interrupts import interruptible
    from fedhet.runs.config import pieces
    from fedhet.runs.config.lines import refuse_blanks
    from fedhet.runs.process import direct_loopback
except ModuleNotFoundError as error:
    from fedhet.runs.cli.exits import report_error

    sys.exit(report_error(error))

COMMANDS = {
    "data": Command("fedhet.runs.data_commands", "download, describe, partition and export data"),
    "export": Command("fedhet.handover.export", "write a model of a run as ONNX or torch program"),
    "predict": Command("fedhet.handover.predict", "apply a model of a run to files"),
    "report": Command(
        "fedhet.study.report", "compare the runs in folders: tables, tests, figures, a page"
    ),
    "deploy": Command(
        "fedhet.deploy", "make, check, start and watch a deployment on real machines"
    ),
    "new": Command(
        "fedhet.runs.cli.new", "write a method, plug-in, model, ... of your own, and its test"
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the arguments say and return the exit code; an error is one line on stderr.

    Args:
        argv: the arguments; those of the process if None.
    """
    os.environ.update(direct_loopback())  # for all processes that are started
    try:
        with interruptible():
            return _main(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt as error:
        if not error.args:  # it has not been told
            print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        drop_output()
        return 0
    except Exception as error:  # noqa: BLE001 -- the last place that can report it in one line
        return report_error(error)


def _main(argv: Sequence[str]) -> int:
    first = Parser(prog=PROGRAM, add_help=False, allow_abbrev=False)  # a command takes it, too
    first.add_argument("--config-dir", action="append", default=[])
    folders, argv = first.parse_known_args(argv)
    pieces.extend_search_path(folders.config_dir)
    _find_packages_here()
    if argv and is_command(argv[0]):
        return run_command(commands(COMMANDS), argv[0], argv[1:])
    refuse_blanks(argv)
    args = _parser().parse_intermixed_args(argv)
    if args.help:
        own = help.options_text(args.overrides) if args.overrides else ""
        print(own or help.help_text(commands(COMMANDS)))
    elif args.version:
        print(_version())
    elif args.list:
        _list(args.overrides)
    elif args.cfg:
        if args.multirun:
            raise ConfigError("--cfg with -m: it shows one configuration; leave out -m")
        from fedhet.runs.config.composition import shown

        print(shown(args.overrides, args.cfg, args.package, resolve=args.resolve), end="")
    else:
        from fedhet.study.launch import start

        return start(args.overrides, sweep=args.multirun, dry=args.dry_run)
    return 0


def _list(words: Sequence[str]) -> None:
    """Print the pieces, and which of them fit; the latter takes seconds for pieces of one's own."""
    if words:
        raise ConfigError(
            f"--list {' '.join(words)}: it lists all methods and plug-ins, and takes nothing else;"
            " --help method, or --help method=<name>, tells more"
        )
    print(help.pieces_text(), flush=True)
    print(help.combinations_text(compatibility()))


def _find_packages_here() -> None:
    """Let the console script find what `python -m fedhet` finds: a trusted package lying here."""
    here = str(Path.cwd())
    if os.environ.get(pieces.TRUST) and here not in sys.path and not sys.flags.safe_path:
        sys.path.append(here)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog=PROGRAM, add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    for flags in (
        ("-h", "--help"),
        ("--version",),
        ("--list",),
        ("--dry-run",),
        ("-m", "--multirun"),
    ):
        parser.add_argument(*flags, action="store_true")
    parser.add_argument("-c", "--cfg", choices=("job", "hydra", "all"))
    parser.add_argument("-p", "--package")
    parser.add_argument("--resolve", action="store_true")
    return parser


def _version() -> str:
    try:
        return f"fedhet {version('fedhet')}"
    except PackageNotFoundError:
        return "fedhet, not installed"


if __name__ == "__main__":
    sys.exit(main())
