"""`python -m fedhet data <command>`: what can be done with data outside a run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fedhet.runs import process
from fedhet.runs.cli.exits import report_error


def main(argv: Sequence[str]) -> int:
    """Run a command and return its exit code, with the same codes as `python -m fedhet`.

    Args:
        argv: the arguments after `data`.
    """
    with process.imports():
        from fedhet.runs.data_commands import declare, download, partitions
        from fedhet.runs.record import terminal

    parser = argparse.ArgumentParser(prog="python -m fedhet data", description=__doc__)
    commands = parser.add_subparsers(metavar="command", required=True)
    for module in (download, partitions, declare):
        module.add_commands(commands)
    if not argv or argv[0] not in commands.choices:
        parser.parse_args(argv)  # prints the help or the error, and exits
    name, *options = argv
    # Overrides may stand on both sides of an option; a parser with subcommands cannot parse that.
    args = commands.choices[name].parse_intermixed_args(options)
    terminal.log_to_stderr()
    try:
        args.run(args)
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 -- the last place that can report it in one line
        return report_error(error)
    return 0
