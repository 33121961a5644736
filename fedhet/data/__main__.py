"""`python -m fedhet data <command>`: what can be done with data outside a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fedhet import process
from fedhet.cli.errors import report_error


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code, with the same codes as `python -m fedhet`.

    Args:
        argv: the arguments; None: those of the process.
    """
    with process.imports():
        from fedhet.data.commands import declare, download, partitions
        from fedhet.record import terminal

    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="python -m fedhet data", description=__doc__)
    commands = parser.add_subparsers(metavar="command", required=True)
    for module in (download, partitions, declare):
        module.add_commands(commands)
    if not arguments or arguments[0] not in commands.choices:
        parser.parse_args(arguments)  # prints the help or the error, and exits
    name, *options = arguments
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


if __name__ == "__main__":
    from fedhet.__main__ import main as fedhet

    sys.exit(fedhet(["data", *sys.argv[1:]]))
