"""What a run of the 2NN holds in memory, one question per process. Prints JSON.

    python scripts/bench/memory.py clients NUMBER SAMPLES COHORT
        {"rounds": seconds of each, "gib": peak beyond the imports}
    python scripts/bench/memory.py growth
        {"growth": resident memory after round 200 / after round 10}
    python scripts/bench/memory.py trees WORKERS
        {"trees": the most clients' trees that are alive in the server}
    python scripts/bench/memory.py states METHOD
        {"gib": peak of the process, "state": GiB of what the clients remember}

`clients`: NUMBER clients with SAMPLES samples each (60,000 at most in total), COHORT of them in
each round; the peak includes the generation of the samples. `growth`: the toy federation with all
its evaluations. `trees`: W1's clients, ten in each round. `states`: 500 clients, all of which take
part in each of three rounds and are evaluated; the peak is that of the whole process, imports
included.
"""

from __future__ import annotations

import resource
import tempfile
from typing import Any

import fedhet_system
import torch
from harness import answer
from workloads import CLASSES, SAMPLES, WORKLOADS, data

import fedhet

# Everything that a run imports must be loaded before its memory is measured.
import fedhet.engines.in_process
import fedhet.runs.job
import fedhet.runs.record.figures
from fedhet.core.targets import cross_entropy
from fedhet.data.toy import toy_task

W1 = WORKLOADS["W1"]


def _peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def clients(number: int, samples: int, cohort: int) -> dict[str, Any]:
    """Seconds and memory of a run with many clients."""
    before = _peak_gib()
    federation = data(W1, SAMPLES // samples)[:number]
    rows = fedhet_system.train(W1, ["rounds=6", f"fraction={cohort / number}"], federation)
    return {**fedhet_system.seconds(rows), "gib": _peak_gib() - before}


def growth() -> dict[str, Any]:
    """The growth of a long run's memory."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            "method=fedavg",
            "method._target_=pieces.Resident",
            "rounds=200",
            f"hydra.run.dir={folder}/run",
        ]
        rss = fedhet.run(overrides, task=toy_task()).rounds["fedavg.rss"]
    return {"growth": float(rss[199] / rss[9])}


def trees(workers: int) -> dict[str, Any]:
    """How many updates the server holds at once."""
    overrides = ["method._target_=pieces.Streaming", f"engine.workers={workers}", "rounds=4"]
    return {"trees": float(fedhet_system.train(W1, overrides, data(W1))["fedavg.trees"].max())}


def states(method: str) -> dict[str, Any]:
    """The memory of a method whose clients remember a model."""
    draw = torch.Generator().manual_seed(0)

    def part(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand(n, 784, generator=draw), torch.randint(CLASSES, (n,), generator=draw)

    federation = [fedhet.ClientData(part(20), None, part(5)) for _ in range(500)]
    task = fedhet.Task(W1.model, cross_entropy, federation, test=None, classes=CLASSES)
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            f"method={method}",
            "rounds=3",
            "eval.every=3",
            "client.epochs=1",
            "client.lr=0.05",
            f"hydra.run.dir={folder}/run",
        ]
        client_state = fedhet.run(overrides, task=task).summary["client_state"]
    return {"gib": _peak_gib(), "state": client_state["bytes"] / 2**30}


if __name__ == "__main__":
    torch.set_num_threads(1)
    answer(clients, growth, trees, states)
