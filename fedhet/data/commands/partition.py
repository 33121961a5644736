"""Save a partition under a name; partition=saved partition.name=<name> uses it again."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides", nargs="*", help="as of a run: dataset=mnist partition=shards seed=1 ..."
    )
    parser.add_argument("--name", required=True, help="letters, digits and _ . + -")


def main(args: argparse.Namespace) -> int:
    from fedhet import config
    from fedhet.data import saved
    from fedhet.data.configured import Configured

    saved.place(args.name)  # a name that is not allowed is told before any data are read
    about = Configured.of(config.compose(args.overrides).cfg).about()
    path = saved.save(args.name, about)
    print(
        f"partition {about['name']} {about['hash']}, {about['clients']} clients: {path}\n"
        f"use it with partition=saved partition.name={args.name}"
    )
    return 0
