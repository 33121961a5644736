"""fedhet on a workload, through its public interface. Prints JSON.

    python scripts/bench/fedhet_system.py rounds W1 [overrides ...]
        {"rounds": seconds of each timed round, "split": these seconds by activity}
    python scripts/bench/fedhet_system.py same W1 [overrides ...]
        the same, with only the first ten clients. They take part in every round, so that the
        clients of a method have their states from the second round on. Their samples are scaled to
        [0, 1], because methods that model pixels need this
    python scripts/bench/fedhet_system.py job W1 [overrides ...]
        {"total": seconds of the whole command `python -m fedhet`}
    python scripts/bench/fedhet_system.py clients NUMBER
        {"rounds": seconds of each, "gib": peak beyond the imports} for NUMBER clients of the 2NN
        with 6 samples each, 100 of them in each round; the peak includes the making of the samples
    python scripts/bench/fedhet_system.py many NUMBER
        {"rounds": seconds of each, "gib": peak of the process} for NUMBER clients of a logistic
        model with two samples each, 1,000 of them in each of six rounds
    python scripts/bench/fedhet_system.py states METHOD
        {"gib": peak of the process with its imports, "state": GiB of the clients' states} for 500
        clients of the 2NN; all of them take part in each of three rounds and are evaluated

The cohorts are fedhet's own (a function of the seed). All clients have 600 samples, so each round
is the same amount of work. The task is given as objects, except for engine=ray and for the whole
command. These configure it: data from pieces.py, fedhet's own model with the same layers, a
partition of the same sizes. Their last round also evaluates ten samples.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

import torch
from harness import ENVIRONMENT, answer
from workloads import CLASSES, CLIENTS, COHORT, LR, SAMPLES, SHARDS, WORKLOADS, Data, Workload, data

import fedhet

# A run's imports must be loaded before its memory is measured.
import fedhet.engines.in_process
import fedhet.runs.job
import fedhet.runs.record.figures
from fedhet.core.targets import cross_entropy

if TYPE_CHECKING:
    from pandas import DataFrame

os.environ.update(ENVIRONMENT)  # if this script runs alone
CONFIGURED = [
    "dataset.name=bench",
    "dataset.mean=[0.0]",
    "dataset.std=[1.0]",
    "partition.split=[1.0,0.0,0.0]",
    "eval.every=1000",
]
MODELS = {"W1": "mlp", "W2": "cnn"}


def settings(workload: Workload, folder: str, clients: int, overrides: list[str]) -> list[str]:
    """Return the overrides of a run: the usual overrides, replaced by the given ones."""
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
    """Return the workload's data, partition and model as overrides."""
    return [
        "dataset._target_=pieces.dataset",
        *CONFIGURED,
        "partition=shards",
        f"partition.clients={CLIENTS}",
        f"partition.shards={SHARDS // CLIENTS}",
        f"model={MODELS[name]}",
    ]


def train(workload: Workload, overrides: list[str], samples: Data | None) -> DataFrame:
    """Return the timed rounds of a run, as in rounds.jsonl.

    Without samples, the overrides configure the task.
    """
    task = None
    if samples:
        clients = [fedhet.ClientData(fedhet.Samples(*pair)) for pair in samples]
        task = fedhet.Task(workload.model, cross_entropy, clients, test=None, classes=CLASSES)
    number = len(samples) if samples else CLIENTS
    with tempfile.TemporaryDirectory() as folder:
        every = fedhet.run(settings(workload, folder, number, overrides), task=task).rounds
    return every[every["phase"] == "train"][1:]


def seconds(rows: DataFrame) -> dict[str, Any]:
    """Return the seconds of each round, in total and by activity."""
    split = rows.filter(regex="^seconds").rename(columns=lambda name: name.partition(".")[2])
    return {"rounds": split.sum(axis=1).tolist(), "split": split.to_dict("records")}


def rounds(name: str, *overrides: str) -> dict[str, Any]:
    """Train the workload."""
    workload = WORKLOADS[name]
    if "engine=ray" in overrides:
        return seconds(train(workload, [*configured(name), *overrides], None))
    return seconds(train(workload, [*overrides], data(workload)))


def same(name: str, *overrides: str) -> dict[str, Any]:
    """Train the first ten clients in every round."""
    workload = WORKLOADS[name]
    samples = data(workload)[:COHORT]
    low = min(float(x.min()) for x, _ in samples)
    high = max(float(x.max()) for x, _ in samples)
    pixels = [((x - low).div_(high - low).clamp_(0, 1), y) for x, y in samples]
    return seconds(train(workload, [*overrides], pixels))


def job(name: str, *overrides: str) -> dict[str, Any]:
    """Run the whole command."""
    with tempfile.TemporaryDirectory() as folder:
        lines = settings(WORKLOADS[name], folder, CLIENTS, [*configured(name), *overrides])
        command = [sys.executable, "-m", "fedhet", *lines]
        began = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True, cwd=folder)
        return {"total": time.perf_counter() - began}


def _peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def clients(number: int) -> dict[str, Any]:
    """Train many clients."""
    before, workload = _peak_gib(), WORKLOADS["W1"]
    samples = data(workload, SAMPLES // 6)[:number]
    rows = train(workload, ["rounds=6", f"fraction={100 / number}"], samples)
    return {**seconds(rows), "gib": _peak_gib() - before}


def many(number: int) -> dict[str, Any]:
    """Train a thousand of very many clients."""
    lines = ["dataset._target_=pieces.many", f"+dataset.n={2 * number}", "model=logistic"]
    lines += [*CONFIGURED, "partition=iid", f"partition.clients={number}", "partition.min_size=1"]
    lines += ["rounds=6", f"fraction={1000 / number}", "eval.clients=false", "client.epochs=1"]
    with tempfile.TemporaryDirectory() as folder:
        every = fedhet.run(["method=fedavg", *lines, f"hydra.run.dir={folder}/run"]).rounds
    return {**seconds(every[1:]), "gib": _peak_gib()}


def states(method: str) -> dict[str, Any]:
    """Train a method that keeps a model in each client's state."""
    draw = torch.Generator().manual_seed(0)

    def part(n: int) -> fedhet.Samples:
        return fedhet.Samples(
            torch.rand(n, 784, generator=draw), torch.randint(CLASSES, (n,), generator=draw)
        )

    federation = [fedhet.ClientData(part(20), None, part(5)) for _ in range(500)]
    model = WORKLOADS["W1"].model
    task = fedhet.Task(model, cross_entropy, federation, test=None, classes=CLASSES)
    lines = [f"method={method}", "rounds=3", "eval.every=3", "client.epochs=1", "client.lr=0.05"]
    with tempfile.TemporaryDirectory() as folder:
        summary = fedhet.run([*lines, f"hydra.run.dir={folder}/run"], task=task).summary
    return {"gib": _peak_gib(), "state": summary["client_state"]["bytes"] / 2**30}


if __name__ == "__main__":
    answer(rounds, same, job, clients, many, states)
