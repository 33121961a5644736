"""`python -m fedhet.data <command>`: what can be done with data outside a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fedhet.data import download
from fedhet.errors import ConfigError, DataError

COMMANDS = {"download": download}


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the arguments say; 2 where a setting or the data are wrong."""
    parser = argparse.ArgumentParser(prog="python -m fedhet.data", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=(module.__doc__ or "").partition("\n")[0])
        module.add_arguments(command)
        command.set_defaults(main=module.main)
    args = parser.parse_args(argv)
    try:
        done: int = args.main(args)
    except (ConfigError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return done


if __name__ == "__main__":
    sys.exit(main())
