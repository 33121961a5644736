"""Show which client would have which samples, as a table and as figures, without training.

The table has at most MAX_ROWS clients, and a column for each class or label, or for each number to
predict, if there are at most MAX_CLASSES.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from fedhet.data.run_data import RunData

MAX_ROWS = 40
MAX_CLASSES = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "overrides", nargs="*", help="as for a run: dataset=mnist partition=shards seed=1 ..."
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="the folder for the figures; default: outputs/partitions/<name>-<hash>",
    )


def main(args: argparse.Namespace) -> int:
    """Print the table of clients, draw the figures, and print their paths."""
    from fedhet import config
    from fedhet.data.run_data import RunData
    from fedhet.record.figures import partition_figures

    data = RunData.of(config.compose(args.overrides).cfg)
    record = data.partition_record()
    folder: Path = args.out or Path("outputs", "partitions", f"{record['name']}-{record['hash']}")
    folder.mkdir(parents=True, exist_ok=True)
    paths = partition_figures(folder, record)
    shown = table(data, record)
    _console_for(shown).print(shown)
    for path in paths:
        print(f"figure: {path.resolve()}")
    return 0


def table(data: RunData, record: dict[str, Any]) -> Table:
    """Clients in rows; samples, parts and targets in columns.

    A class or label has its number of samples, a number to predict its mean and deviation.

    Args:
        data: the data of a configuration.
        record: its `partition_record()`.
    """
    from rich.table import Table

    from fedhet.core.check import counted

    dataset, counts, part_sizes = data.dataset, record["counts"], data.clients.part_sizes
    clients, number = record["clients"], dataset.target == "number"
    sizes = [sum(parts) for parts in part_sizes]
    pooled = " with its test set" if data.scheme.pool_test else ""
    columns: list[tuple[str, Sequence[object]]] = [("client", range(clients))]
    if record["owners"]:
        columns.append(("owner", record["owners"]))
    if data.scheme.noise:
        deviations = [f"{data.clients.noise_sd(pid):.3f}" for pid in range(clients)]
        columns.append(("noise sd", deviations))
    parts = zip(("train", "val", "test"), zip(*part_sizes, strict=True), strict=True)
    columns += [("samples", sizes), *parts]
    if not number:
        held = [sum(n > 0 for n in each) for each in counts]
        columns.append(("labels" if dataset.target == "labels" else "classes", held))
    if len(dataset.outputs) <= MAX_CLASSES:
        by_client = [_numbers(data, pid) for pid in range(clients)] if number else counts
        columns += zip(dataset.outputs, zip(*by_client, strict=True), strict=True)
    shown = Table(
        title=(
            f"{record['name']} partition {record['hash']} of {dataset.name}{pooled}:"
            f" {counted(clients, 'client')}, {sum(sizes)} of"
            f" {counted(record['samples'], 'sample')}, {min(sizes)} to {max(sizes)} each, target"
            f" {dataset.target}"
        ),
        caption=f"the first {MAX_ROWS} of {clients} clients" if clients > MAX_ROWS else None,
    )
    for header, _ in columns:
        shown.add_column(header, justify="left" if header == "owner" else "right", no_wrap=True)
    for row in islice(zip(*(values for _, values in columns), strict=True), MAX_ROWS):
        shown.add_row(*map(str, row))
    return shown


def _numbers(data: RunData, pid: int) -> list[str]:
    """Mean and standard deviation of each number over the samples of a client."""
    y = data.dataset.y.numpy()[data.partition.indices[pid]]
    if not len(y):
        return ["-"] * y.shape[1]
    moments = zip(y.mean(0, dtype=float), y.std(0, dtype=float), strict=True)
    return [f"{mean:.4g} ± {deviation:.3g}" for mean, deviation in moments]


def _console_for(shown: Table) -> Console:
    """The terminal, or a file that is wide enough for every column of the table."""
    from fedhet.record.terminal import Output

    console = Output()
    if console.is_terminal:
        return console
    options = console.options.update(max_width=10_000)
    return Output(width=max(console.width, console.measure(shown, options=options).maximum))
