"""`python -m fedhet data <command>`: what can be done with data outside a run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fedhet.runs import process


def main(argv: Sequence[str]) -> int:
    """Run a command and return its exit code.

    Args:
        argv: the arguments after `data`.

    Raises:
        ConfigError, DataError: a setting, an argument or a file is wrong.
        WriteError: a file cannot be written.
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
    args.run(args)
    return 0
