"""Write a client's own samples to a file that its machine can keep, and nothing of the others."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedhet.errors import ConfigError

if TYPE_CHECKING:
    from fedhet.data.configured import Configured


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides", nargs="*", help="as of the run: dataset=mnist partition=shards seed=1 ..."
    )
    parser.add_argument(
        "--client",
        type=int,
        required=True,
        action="append",
        help="its number; may be given several times",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of client-<number>.npz")


def main(args: argparse.Namespace) -> int:
    from fedhet import config
    from fedhet.data.configured import Configured

    found = Configured.of(config.compose(args.overrides).cfg)
    for pid in args.client:
        print(write(found, pid, args.out))
    return 0


def write(found: Configured, pid: int, folder: Path) -> Path:
    """`folder`/client-<pid>.npz: x_train, y_train, and x_val, y_val, x_test, y_test where the
    client has such samples.

    They are what the client would use, before normalisation: uint8 or floating, its noise included.
    `classes`, `mean` and `std` are those of the dataset.

    Raises:
        ConfigError: there is no such client.
    """
    if not 0 <= pid < len(found.clients):
        raise ConfigError(
            f"--client {pid}: the partition has the clients 0 to {len(found.clients) - 1}"
        )
    client = found.clients[pid]
    parts = {"train": client.train, "val": client.val, "test": client.test}
    arrays = {
        f"{axis}_{part}": getattr(samples, axis).numpy()
        for part, samples in parts.items()
        if samples is not None
        for axis in "xy"
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.resolve() / f"client-{pid}.npz"
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        whole = Path(scratch, path.name)
        about = {key: np.array(getattr(found.dataset, key)) for key in ("classes", "mean", "std")}
        np.savez(whole, allow_pickle=False, **about, **arrays)
        whole.replace(path)  # atomic
    return path
