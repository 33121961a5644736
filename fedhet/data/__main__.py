"""`python -m fedhet.data <command>`: what can be done with data outside a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fedhet import process
from fedhet.cli.errors import report_error

with process.imports():
    from fedhet.data.commands import describe, download, export, partition
    from fedhet.record import terminal

COMMANDS = {"download": download, "describe": describe, "partition": partition, "export": export}


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the arguments say (those of the process if None); exit codes as `python -m
    fedhet`."""
    lines = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="python -m fedhet.data", description=__doc__)
    commands = parser.add_subparsers(metavar="command", required=True)
    for name, module in COMMANDS.items():
        about = (module.__doc__ or "").partition("\n")[0]
        module.add_arguments(commands.add_parser(name, help=about, description=about))
    if not lines or lines[0] not in COMMANDS:
        parser.parse_args(lines)  # prints the help or what is wrong, and exits
    args = commands.choices[lines[0]].parse_intermixed_args(lines[1:])
    terminal.log_to_stderr()
    try:
        return COMMANDS[lines[0]].main(args)
    except Exception as error:  # noqa: BLE001 -- the last place that can tell it in one line
        return report_error(error)


if __name__ == "__main__":
    sys.exit(main())
