"""fedhet on a workload, by its public interface. Prints JSON.

    python scripts/bench/fedhet_system.py W1 [--pixels] [--same] [overrides ...]
    python scripts/bench/fedhet_system.py W1 --job [overrides ...]

The cohorts are fedhet's own (a function of the seed); all clients have 600 samples, so that each
round is the same work. In process the task is given as objects. For other engines it is configured
(its data by pieces.py, its model fedhet's own of the same layers, its partition of the same sizes),
and the last round evaluates ten samples.

--pixels brings the samples into [0, 1], as methods that model pixels want them. --same leaves the
first ten clients, who then take part in every round: what a method's clients remember is there from
the second on. --job runs `python -m fedhet` on the configured task and takes the seconds from the
command to its end."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import ABSENT, ENVIRONMENT
from workloads import (
    CLASSES,
    CLIENTS,
    COHORT,
    LR,
    SHARDS,
    WORKLOADS,
    Data,
    Workload,
    criterion,
    data,
)

import fedhet
from fedhet.errors import ConfigError

MODELS = {"W1": "mlp", "W2": "cnn"}


def prepare() -> None:
    """What the harness gives its systems, also where one runs alone."""
    os.environ.update(ENVIRONMENT)


def settings(workload: Workload, folder: str, clients: int, overrides: list[str]) -> list[str]:
    """The overrides of a run, those given last in place of the usual ones."""
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
    return [
        f"{key}={value}"
        for key, value in (usual | dict(line.split("=", 1) for line in overrides)).items()
    ]


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


def rows(workload: Workload, overrides: list[str], samples: Data | None) -> list[dict[str, Any]]:
    """The timed rounds of a run, as rounds.jsonl has them; without samples the overrides configure
    the task."""
    task = None
    if samples:
        clients = [fedhet.ClientData(fedhet.Samples(*pair)) for pair in samples]
        task = fedhet.Task(
            model=workload.model, criterion=criterion, clients=clients, test=None, classes=CLASSES
        )
    with tempfile.TemporaryDirectory() as folder:
        done = fedhet.run(
            settings(workload, folder, len(samples or range(CLIENTS)), overrides), task=task
        )
        found = [json.loads(line) for line in (done.dir / "rounds.jsonl").read_text().splitlines()]
    return [row for row in found if row["phase"] == "train"][1:]


def pixels(samples: Data) -> Data:
    low, high = min(float(x.min()) for x, _ in samples), max(float(x.max()) for x, _ in samples)
    return [((x - low).div_(high - low).clamp_(0, 1), y) for x, y in samples]


def job(name: str, overrides: list[str]) -> float:
    """Seconds of the command."""
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--pixels", action="store_true")
    parser.add_argument("--same", action="store_true")
    parser.add_argument("--job", action="store_true")
    args = parser.parse_intermixed_args()
    prepare()
    workload = WORKLOADS[args.workload]
    if args.job:
        print(json.dumps({"total": job(args.workload, args.overrides)}))
        return
    try:
        if "engine=ray" in args.overrides:
            found = rows(workload, configured(args.workload) + args.overrides, None)
        else:
            samples = data(workload)[: COHORT if args.same else CLIENTS]
            found = rows(workload, args.overrides, pixels(samples) if args.pixels else samples)
    except ConfigError as error:
        if not str(error).startswith("unknown setting"):  # of a fedhet that does not have it yet
            raise
        print(error, file=sys.stderr)
        raise SystemExit(ABSENT) from None
    split = [row["seconds"] for row in found]
    print(json.dumps({"rounds": [sum(seconds.values()) for seconds in split], "split": split}))


if __name__ == "__main__":
    main()
