"""Write a client's own samples, and no other client's, to a file for its machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedhet.core.errors import ConfigError
from fedhet.record.files import written

if TYPE_CHECKING:
    from fedhet.data.run_data import RunData


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "overrides", nargs="*", help="as for the run: dataset=mnist partition=shards seed=1 ..."
    )
    parser.add_argument(
        "--client",
        type=int,
        required=True,
        action="append",
        help="the client's number; may be given several times",
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="the folder for client-<number>.npz"
    )


def main(args: argparse.Namespace) -> int:
    """Write a file for each `--client` and print their paths."""
    from fedhet import config
    from fedhet.data.run_data import RunData

    data = RunData.of(config.compose(args.overrides).cfg)
    for pid in args.client:
        print(write(data, pid, args.out))
    return 0


def write(data: RunData, pid: int, folder: Path) -> Path:
    """Write `folder`/client-<pid>.npz and return its path.

    The arrays are x_train and y_train, and x_val, y_val, x_test and y_test where the client has
    such samples. They are what the client would use, before normalisation: uint8 or floating, with
    its noise. `classes`, `mean` and `std` are those of the dataset, and so are `target` and what
    else describes its targets and texts, where it has them.

    Raises:
        ConfigError: there is no such client.
    """
    if not 0 <= pid < len(data.clients):
        raise ConfigError(
            f"--client {pid}: the partition has the clients 0 to {len(data.clients) - 1}"
        )
    client = data.clients[pid]
    dataset = data.dataset
    keys = ["classes", "mean", "std"]  # what `dataset=npz` reads
    if dataset.target == "number":
        keys = ["mean", "std", "target", "numbers", "target_mean", "target_std"]
    elif dataset.target != "class":
        keys.append("target")
    if dataset.text:
        keys += ["vocabulary", *([] if dataset.padding is None else ["padding"])]
        keys += [] if "target" in keys else ["target"]
    arrays = {key: np.array(getattr(dataset, key)) for key in keys}
    for part in ("train", "val", "test"):
        samples = getattr(client, part)
        if samples is not None:
            arrays[f"x_{part}"] = samples.x.numpy()
            arrays[f"y_{part}"] = samples.y.numpy()
    path = folder.resolve() / f"client-{pid}.npz"
    with written(path) as part, part.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    return path
