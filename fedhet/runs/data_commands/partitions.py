"""Commands on the partition of a configuration: `describe`, `partition` and `export`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedhet.core.check import counted
from fedhet.core.errors import ConfigError
from fedhet.data.dataset import AUTO, OWN
from fedhet.data.storage import written

if TYPE_CHECKING:
    from fedhet.runs.run_data import RunData

MAX_ROWS = 40  # of the table of clients
MAX_CLASSES = 20  # with more classes, labels or numbers, the table has no columns for them
# What add_argument takes.
OVERRIDES: dict[str, dict[str, Any]] = {
    "overrides": {
        "nargs": "*",
        "help": "settings as for a run: dataset=mnist partition=shards seed=1 ...",
    }
}
DESCRIBE: dict[str, dict[str, Any]] = OVERRIDES | {
    "--out": {
        "type": Path,
        "help": "the folder for the figures; default: outputs/partitions/<name>-<hash>",
    }
}
PARTITION: dict[str, dict[str, Any]] = OVERRIDES | {
    "--name": {"required": True, "help": "its name, from letters, digits and _ . + -"}
}
EXPORT: dict[str, dict[str, Any]] = OVERRIDES | {
    "--client": {
        "type": int,
        "required": True,
        "action": "append",
        "help": "the client's number; may be given several times",
    },
    "--out": {"type": Path, "required": True, "help": "the folder for client-<number>.npz"},
}


def _data(overrides: Sequence[str]) -> RunData:
    from fedhet.runs import config
    from fedhet.runs.run_data import RunData

    return RunData.of(config.compose(overrides).cfg)


def partition(args: argparse.Namespace) -> None:
    """Save a partition under a name, for runs with partition=saved partition.name=<name>."""
    from fedhet.data.partition import save, saved_path

    saved_path(args.name)  # reports a wrong name before any data are read
    record = _data(args.overrides).partition_record()
    path = save(args.name, record)
    clients = counted(record["clients"], "client")
    print(
        f"partition {record['name']} {record['hash']}, {clients}: {path}\n"
        f"use it with partition=saved partition.name={args.name}"
    )


def export(args: argparse.Namespace) -> None:
    """Write only the samples of one client to a file, for this client's machine."""
    data = _data(args.overrides)
    for pid in args.client:
        print(write(data, pid, args.out))


def write(data: RunData, pid: int, folder: Path) -> Path:
    """Write `folder`/client-<pid>.npz and return its path.

    The arrays are x_train and y_train, and x_val, y_val, x_test and y_test if the client has such
    samples. They hold the client's samples before normalisation: uint8 or floating, with its noise,
    and with missing values filled. If each client normalises by its own mean and std, they are
    normalised. The file also has `target`, `classes`, `mean` and `std` of the dataset, and, if the
    dataset has them, further entries that describe its targets and texts.

    Raises:
        ConfigError: there is no such client.
    """
    if not 0 <= pid < len(data.clients):
        raise ConfigError(
            f"--client {pid}: there is no such client; the partition has the clients 0 to"
            f" {len(data.clients) - 1}"
        )
    client = data.clients[pid]
    dataset = data.dataset
    if dataset.mean == OWN:
        dataset = replace(dataset, mean=(0.0,), std=(1.0,))
    # The entries that `dataset=npz` reads, if the dataset has them.
    keys = ["target", "classes", "numbers", "mean", "std", "target_mean", "target_std"]
    keys += ["vocabulary", "padding"] if dataset.text else []
    values = {key: getattr(dataset, key) for key in keys}
    arrays = {
        key: np.array(value) for key, value in values.items() if value not in (None, AUTO, ())
    }
    for part in ("train", "val", "test"):
        samples = getattr(client, part)
        if samples is not None:
            arrays[f"x_{part}"] = samples.x.numpy()
            arrays[f"y_{part}"] = samples.y.numpy()
    path = folder.resolve() / f"client-{pid}.npz"
    with written(path) as unfinished, unfinished.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    return path


def describe(args: argparse.Namespace) -> None:
    """Show which samples each client would have, as a table and a figure, without training."""
    from fedhet.runs.record.figures import labels, save

    data = _data(args.overrides)
    record = data.partition_record()
    folder: Path = args.out or Path("outputs", "partitions", f"{record['name']}-{record['hash']}")
    folder.mkdir(parents=True, exist_ok=True)
    print(table(data, record))
    if picture := labels(record):
        print(f"figure: {save(picture, folder / 'labels.png').resolve()}")


def table(data: RunData, record: dict[str, Any]) -> str:
    """Return a table with a row per client and columns for samples, parts and targets.

    The column of a class or label has its number of samples; the column of a number to predict has
    its mean and standard deviation.

    Args:
        data: the data of a configuration.
        record: its `partition_record()`.
    """
    import pandas

    dataset, counts, part_sizes = data.dataset, record["counts"], data.clients.part_sizes
    clients, number = record["clients"], dataset.target == "number"
    sizes = [sum(parts) for parts in part_sizes]
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
    headers, values = zip(*columns, strict=True)
    rows = pandas.DataFrame(zip(*values, strict=True), columns=headers)
    pooled = " with its test set" if data.scheme.pool_test else ""
    shown = f" (only the first {MAX_ROWS} clients are shown)" if clients > MAX_ROWS else ""
    return (
        f"{record['name']} partition {record['hash']} of {dataset.name}{pooled}:"
        f" {counted(clients, 'client')}, {sum(sizes)} of"
        f" {counted(record['samples'], 'sample')}, {min(sizes)} to {max(sizes)} each, target"
        f" {dataset.target}{shown}\n{rows[:MAX_ROWS].to_string(index=False)}"
    )


def _numbers(data: RunData, pid: int) -> list[str]:
    """Return the mean and standard deviation of each number over the samples of a client."""
    y = data.dataset.y.numpy()[data.partition.indices[pid]]
    if not len(y):
        return ["-"] * y.shape[1]
    moments = zip(y.mean(0, dtype=float), y.std(0, dtype=float), strict=True)
    return [f"{mean:.4g} ± {deviation:.3g}" for mean, deviation in moments]
