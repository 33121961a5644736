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
from fedhet.core.errors import ConfigError

MODELS = {"W1": "mlp", "W2": "cnn"}


def prepare() -> None:
    """Set the environment that the harness gives its systems, for a script that runs alone."""
    os.environ.update(ENVIRONMENT)


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


def timed_rows(
    workload: Workload, overrides: list[str], samples: Data | None
) -> list[dict[str, Any]]:
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
        run = fedhet.run(settings(workload, folder, number, overrides), task=task)
        rows = [json.loads(line) for line in (run.dir / "rounds.jsonl").read_text().splitlines()]
    return [row for row in rows if row["phase"] == "train"][1:]


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
            rows = timed_rows(workload, configured(args.workload) + args.overrides, None)
        else:
            samples = data(workload)[: COHORT if args.same else CLIENTS]
            if args.pixels:
                samples = to_pixels(samples)
            rows = timed_rows(workload, args.overrides, samples)
    except ConfigError as error:
        # A version of fedhet that does not have the setting yet is left out of a comparison.
        if not str(error).startswith("unknown setting"):
            raise
        print(error, file=sys.stderr)
        raise SystemExit(ABSENT) from None
    seconds = [row["seconds"] for row in rows]
    print(json.dumps({"rounds": [sum(parts.values()) for parts in seconds], "split": seconds}))


if __name__ == "__main__":
    main()
