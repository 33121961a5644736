"""fedhet on a workload, through its public interface. Prints JSON.

    python scripts/bench/fedhet_system.py W1 [--pixels] [--same] [overrides ...]
    python scripts/bench/fedhet_system.py W1 --job [overrides ...]

The cohorts are fedhet's own (a function of the seed); all clients have 600 samples, so each round
is the same amount of work. In process the task is given as objects. For other engines it is
configured: data from pieces.py, fedhet's own model with the same layers, a partition of the same
sizes; the last round then evaluates ten samples.

--pixels scales the samples to [0, 1], as methods that model pixels need them. --same keeps the
first ten clients only, which thus take part in every round, so that what a method's clients
remember is there from the second round on. --job runs `python -m fedhet` on the configured task and
measures the seconds of the whole command.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from harness import ENVIRONMENT
from workloads import (
    CLASSES,
    CLIENTS,
    COHORT,
    LR,
    SHARDS,
    WORKLOADS,
    Data,
    Workload,
    arguments,
    criterion,
    data,
)

import fedhet

if TYPE_CHECKING:
    from pandas import DataFrame

os.environ.update(ENVIRONMENT)  # for a script that runs alone
MODELS = {"W1": "mlp", "W2": "cnn"}


def settings(workload: Workload, folder: str, clients: int, overrides: list[str]) -> list[str]:
    """The overrides of a run: the usual ones, replaced by those given."""
    usual = {
        "method": "fedavg",
        "rounds": workload.rounds + 1,
        "fraction": COHORT / clients,
        "eval.clients": "false",
        "client.epochs": 1,
        "client.lr": LR,
        "client.batch_size": workload.batch,
        "hydra.run.dir": f"{folder}/run",
    }
    given = dict(override.split("=", 1) for override in overrides)
    return [f"{key}={value}" for key, value in (usual | given).items()]


def configured(name: str) -> list[str]:
    """The workload's data, partition and model as overrides."""
    return [
        "dataset._target_=pieces.dataset",
        f"dataset.name={name}",
        "dataset.mean=[0.0]",
        "dataset.std=[1.0]",
        "eval.every=1000",
        "partition=shards",
        f"partition.clients={CLIENTS}",
        f"partition.shards={SHARDS // CLIENTS}",
        "partition.split=[1.0,0.0,0.0]",
        f"model={MODELS[name]}",
    ]


def rounds(workload: Workload, overrides: list[str], samples: Data | None) -> DataFrame:
    """The timed rounds of a run, as in rounds.jsonl.

    Without samples, the overrides configure the task.
    """
    task = None
    if samples:
        clients = [fedhet.ClientData(fedhet.Samples(*pair)) for pair in samples]
        task = fedhet.Task(
            model=workload.model, criterion=criterion, clients=clients, test=None, classes=CLASSES
        )
    number = len(samples) if samples else CLIENTS
    with tempfile.TemporaryDirectory() as folder:
        every = fedhet.run(settings(workload, folder, number, overrides), task=task).rounds
    return every[every["phase"] == "train"][1:]


def seconds(rows: DataFrame) -> DataFrame:
    """The seconds of each round, by what they were spent on."""
    return rows.filter(regex="^seconds").rename(columns=lambda name: name.partition(".")[2])


def to_pixels(samples: Data) -> Data:
    """The samples scaled to [0, 1]."""
    low = min(float(x.min()) for x, _ in samples)
    high = max(float(x.max()) for x, _ in samples)
    return [((x - low).div_(high - low).clamp_(0, 1), y) for x, y in samples]


def job(name: str, overrides: list[str]) -> float:
    """Seconds of the whole command."""
    with tempfile.TemporaryDirectory() as folder:
        lines = settings(WORKLOADS[name], folder, CLIENTS, configured(name) + overrides)
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "fedhet", *lines],
            env=ENVIRONMENT,
            stdout=subprocess.DEVNULL,
            check=True,
            cwd=Path(folder),
        )
        return time.perf_counter() - began


def main() -> None:
    """Run the workload and print its seconds."""
    args = arguments(__doc__, WORKLOADS, "--pixels", "--same", "--job")
    workload, name = WORKLOADS[args.workload], args.workload
    if args.job:
        print(json.dumps({"total": job(name, args.overrides)}))
        return
    if "engine=ray" in args.overrides:
        spent = seconds(rounds(workload, configured(name) + args.overrides, None))
    else:
        samples = data(workload)[: COHORT if args.same else CLIENTS]
        samples = to_pixels(samples) if args.pixels else samples
        spent = seconds(rounds(workload, args.overrides, samples))
    print(json.dumps({"rounds": spent.sum(axis=1).tolist(), "split": spent.to_dict("records")}))


if __name__ == "__main__":
    main()
