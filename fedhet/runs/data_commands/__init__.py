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
    table = {
        "download": (download.main, download.__doc__, download.ARGUMENTS),
        "describe": (partitions.describe, partitions.describe.__doc__, partitions.DESCRIBE),
        "partition": (partitions.partition, partitions.partition.__doc__, partitions.PARTITION),
        "export": (partitions.export, partitions.export.__doc__, partitions.EXPORT),
        "declare": (declare.main, declare.__doc__, declare.ARGUMENTS),
    }
    for name, (run, text, arguments) in table.items():
        summary = (text or "").partition("\n")[0]
        command = commands.add_parser(name, help=summary, description=summary)
        command.set_defaults(run=run)
        for argument, options in arguments.items():
            command.add_argument(argument, **options)
    if not argv or argv[0] not in commands.choices:
        parser.parse_args(argv)  # prints the help or the error, and exits
    # Overrides may stand on both sides of an option; a parser with subcommands cannot parse that.
    args = commands.choices[argv[0]].parse_intermixed_args(argv[1:])
    terminal.log_to_stderr()
    args.run(args)
    return 0
