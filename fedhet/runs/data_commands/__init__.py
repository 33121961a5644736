"""Commands for data outside of a run: `python -m fedhet data <command>`."""

from __future__ import annotations

from collections.abc import Sequence

from fedhet.runs import process
from fedhet.runs.cli.exits import Arguments, Call, subcommand


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

    terminal.log_to_stderr()
    table: dict[str, tuple[Call, str | None, Arguments]] = {
        "download": (download.main, download.__doc__, download.ARGUMENTS),
        "describe": (partitions.describe, partitions.describe.__doc__, partitions.DESCRIBE),
        "partition": (partitions.partition, partitions.partition.__doc__, partitions.PARTITION),
        "export": (partitions.export, partitions.export.__doc__, partitions.EXPORT),
        "declare": (declare.main, declare.__doc__, declare.ARGUMENTS),
    }
    return subcommand("python -m fedhet data", __doc__, table, argv)
