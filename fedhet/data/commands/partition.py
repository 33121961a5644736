"""Save a partition under a name; partition=saved partition.name=<name> uses it again."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "overrides", nargs="*", help="as for a run: dataset=mnist partition=shards seed=1 ..."
    )
    parser.add_argument("--name", required=True, help="letters, digits and _ . + -")


def main(args: argparse.Namespace) -> int:
    """Save the partition of the overrides as `--name`."""
    from fedhet import config
    from fedhet.core.check import counted
    from fedhet.data.partition import save, saved_path
    from fedhet.data.run_data import RunData

    saved_path(args.name)  # a name that is not allowed is reported before any data are read
    record = RunData.of(config.compose(args.overrides).cfg).partition_record()
    path = save(args.name, record)
    clients = counted(record["clients"], "client")
    print(
        f"partition {record['name']} {record['hash']}, {clients}: {path}\n"
        f"use it with partition=saved partition.name={args.name}"
    )
    return 0
