"""Who would hold what: a table of the clients, and figures, without training.

The table has at most MOST clients and, where there are so few classes that it stays readable, a
column per class."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from fedhet.data.configured import Configured

MOST = 40  # rows
COLUMNS = 20  # classes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides", nargs="*", help="as of a run: dataset=mnist partition=shards seed=1 ..."
    )
    parser.add_argument(
        "--out", type=Path, help="folder of the figures; default: outputs/partitions/<name>-<hash>"
    )


def main(args: argparse.Namespace) -> int:
    from rich.console import Console

    from fedhet import config
    from fedhet.data.configured import Configured
    from fedhet.record import figures

    found = Configured.of(config.compose(args.overrides).cfg)
    about = found.about()
    folder: Path = args.out or Path("outputs", "partitions", f"{about['name']}-{about['hash']}")
    folder.mkdir(parents=True, exist_ok=True)
    drawn = figures.partition_figures(folder, about)
    console = Console()
    shown = table(found, about)
    if not console.is_terminal:  # a file has room for every column
        console = Console(
            width=max(
                console.width,
                console.measure(shown, options=console.options.update(max_width=10_000)).maximum,
            )
        )
    console.print(shown)
    for path in drawn:
        print(f"figure: {path.resolve()}")
    return 0


def table(found: Configured, about: dict[str, Any]) -> Table:
    """Clients in rows; samples, parts and classes in columns."""
    from rich.table import Table

    clients, classes, counts = about["clients"], about["classes"], about["counts"]
    sizes = [sum(parts) for parts in found.clients.parts]
    few = len(classes) <= COLUMNS
    shown = Table(
        title=(
            f"{about['name']} partition {about['hash']} of {found.dataset.name}: {clients} clients,"
            f" {sum(sizes)} of {about['samples']} samples, {min(sizes)} to {max(sizes)} each"
        ),
        caption=f"the first {MOST} of {clients} clients" if clients > MOST else None,
    )
    heads = [
        "client",
        *(["owner"] if about["owners"] else []),
        *(["noise sd"] if found.scheme.noise else []),
        "samples",
        "train",
        "val",
        "test",
        "classes",
        *(classes if few else []),
    ]
    for head in heads:
        shown.add_column(head, justify="left" if head == "owner" else "right", no_wrap=True)
    for pid in range(min(clients, MOST)):
        row = [
            pid,
            *about["owners"][pid : pid + 1],
            *([f"{found.clients.noise_sd(pid):.3f}"] if found.scheme.noise else []),
            sizes[pid],
            *found.clients.parts[pid],
            sum(n > 0 for n in counts[pid]),
            *(counts[pid] if few else []),
        ]
        shown.add_row(*map(str, row))
    return shown
