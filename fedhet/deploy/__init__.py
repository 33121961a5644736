"""`python -m fedhet deploy`: the files of a deployment, checks of them, and who is online."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Run `python -m fedhet deploy` and return its exit code.

    Args:
        argv: the arguments after `deploy`.
    """
    # These run for months and need no torch, which the other commands import.
    if argv and argv[0] == "node":
        from fedhet.deploy import node

        node.main(argv[1:])
        return 0
    if argv and argv[0] == "link":
        from fedhet.deploy import link

        link.main(argv[1:])
        return 0
    from fedhet.deploy import __main__ as commands

    return commands.main(argv)
