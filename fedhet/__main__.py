"""`python -m fedhet`, which is also the console script `fedhet`: help, commands, and runs.

Without a command, a run starts. An installed package adds commands by an entry point of the group
`fedhet.commands`, such as `mine = "my_package.command"`. --help describes the command by the
summary of its package.

Exit codes: 0 success, 1 a run failed, 2 a wrong setting or missing data, 3 a run lost more replies
than `replies.max_lost` allows, 130 interrupted by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036 -- says so before anything fails
    sys.exit("error: fedhet needs Python 3.11 or newer; " + sys.executable + " is older")

import argparse
import difflib
import os
from collections.abc import Collection, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

try:
    from fedhet.core.check import did_you_mean
    from fedhet.core.errors import ConfigError
    from fedhet.runs.cli import help
    from fedhet.runs.cli.exits import (
        INTERRUPTED,
        PROGRAM,
        Parser,
        drop_output,
        interruptible,
        report_error,
    )
    from fedhet.runs.config import catalogue, components
    from fedhet.runs.config.lines import refuse_blanks
    from fedhet.runs.process import direct_loopback
except ModuleNotFoundError as error:
    from fedhet.runs.cli.exits import report_error

    sys.exit(report_error(error))

ENTRY_POINTS = "fedhet.commands"
Command = tuple[str, str]  # a module with a function main(argv) -> exit code, and a line for --help
COMMANDS: dict[str, Command] = {
    "data": ("fedhet.runs.data_commands", "download, describe, partition and export data"),
    "export": ("fedhet.handover.export", "write a model of a run as ONNX or torch program"),
    "predict": ("fedhet.handover.predict", "apply a model of a run to files"),
    "report": (
        "fedhet.study.report",
        "compare the runs in folders: tables, tests, figures, a page",
    ),
    "deploy": ("fedhet.deploy", "make, check, start and watch a deployment on real machines"),
    "new": ("fedhet.runs.cli.new", "write a method, plug-in, model, ... of your own, and its test"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the arguments say and return the exit code; an error is one line on stderr.

    Args:
        argv: the arguments; None: the arguments of the process.
    """
    os.environ.update(direct_loopback())  # for all processes that are started
    try:
        with interruptible():
            return _main(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt as error:
        if not error.args:  # no message about it was printed
            print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        drop_output()
        return 0
    except Exception as error:  # noqa: BLE001 -- the last place that can print one line about it
        return report_error(error)


def _main(argv: Sequence[str]) -> int:
    first = Parser(prog=PROGRAM, add_help=False, allow_abbrev=False)  # commands take these, too
    first.add_argument("--config-dir", action="append", default=[])
    folders, argv = first.parse_known_args(argv)
    components.extend_search_path(folders.config_dir)
    _find_packages_here()
    if argv and "=" not in argv[0] and not argv[0].startswith(("-", "~")):
        return _run_command(argv[0], argv[1:])
    refuse_blanks(argv)
    args = _parser().parse_intermixed_args(argv)
    if args.help:
        own = help.options_text(args.overrides) if args.overrides else ""
        print(own or help.help_text(commands()))
    elif args.version:
        print(_version())
    elif args.list:
        _list(args.overrides)
    elif args.cfg:
        if args.multirun:
            raise ConfigError("--cfg with -m: --cfg prints one configuration only; leave out -m")
        from fedhet.runs.config.composition import shown

        print(shown(args.overrides), end="")
    else:
        from fedhet.study.launch import start

        return start(args.overrides, sweep=args.multirun, dry=args.dry_run)
    return 0


def commands() -> dict[str, Command]:
    """Return the commands of fedhet and of installed packages; no package is imported."""
    installed = {
        point.name: (point.module, point.dist.metadata["Summary"])
        for point in entry_points(group=ENTRY_POINTS)
        if point.dist is not None and point.name not in COMMANDS
    }
    return COMMANDS | installed


def _run_command(word: str, argv: Sequence[str]) -> int:
    """Run the command with its own arguments and return its exit code."""
    every = commands()
    if word not in every:
        refuse_blanks([word, *argv])
        raise ConfigError(
            f"{word!r} is neither a command nor an override key=value{_closest(word, every)};"
            f" commands: {', '.join(every)}; see python -m fedhet --help"
        )
    return import_module(every[word][0]).main(argv)


def _closest(word: str, every: Collection[str]) -> str:
    """Return a hint with the closest commands and overrides `group=choice`."""
    suggestions = {name: [name] for name in every}
    for group, choices in catalogue.groups().items():
        for choice in choices:
            suggestions.setdefault(choice, []).append(f"{group}={choice}")
    similar = difflib.get_close_matches(word, suggestions, n=1)
    return did_you_mean(word, (), [text for name in similar for text in suggestions[name]])


def _list(words: Sequence[str]) -> None:
    """Print methods, plug-ins and combinations; it takes seconds if the user has own components."""
    if words:
        raise ConfigError(
            f"--list {' '.join(words)}: --list takes no arguments and prints all methods and"
            " plug-ins; for more about them, use --help method or --help method=<name>"
        )
    print(help.components_text(), flush=True)
    print(help.combinations_text(help.compatibility()))


def _find_packages_here() -> None:
    """Let the console script import a trusted package of this folder, as `python -m fedhet` can."""
    here = str(Path.cwd())
    if os.environ.get(components.TRUST) and here not in sys.path and not sys.flags.safe_path:
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
    parser.add_argument("-c", "--cfg", choices=("job",))
    return parser


def _version() -> str:
    try:
        return f"fedhet {version('fedhet')}"
    except PackageNotFoundError:
        return "fedhet, not installed"


if __name__ == "__main__":
    sys.exit(main())
