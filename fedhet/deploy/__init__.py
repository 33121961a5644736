"""`python -m fedhet deploy`: writes and checks a deployment's files, and shows who is online.

It may import core, data, flower and runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module


def main(argv: Sequence[str]) -> int:
    """Run `python -m fedhet deploy` and return its exit code.

    Args:
        argv: the arguments after `deploy`.
    """
    if argv and argv[0] in ("node", "link"):
        # These run for months and do not need torch; the other commands import it.
        getattr(import_module("fedhet.deploy.node"), argv[0])(argv[1:])
        return 0
    return import_module("fedhet.deploy.subcommands").main(argv)
