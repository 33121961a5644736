"""What a run of the 2NN holds in memory, each question in a process of its own. Prints JSON.

    python scripts/bench/memory.py clients NUMBER SAMPLES COHORT   {"rounds": seconds of each,
    "gib": peak beyond the imports} python scripts/bench/memory.py growth
    {"growth": resident memory after round 200 / after round 10} python scripts/bench/memory.py
    trees WORKERS                   {"trees": most of the clients' trees alive in the server} python
    scripts/bench/memory.py states METHOD                   {"gib": peak of the process, "state":
    GiB of what the clients remember}

`clients`: that many clients of so many samples each (60,000 at most in all), COHORT of them in each
round; the peak includes what makes the samples. `growth`: the toy federation with all its
evaluations. `trees`: W1's clients, ten in each round. `states`: 500 clients, all of them in each of
three rounds and evaluated; the peak is the whole process's, imports included."""

from __future__ import annotations

import json
import resource
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import fedhet_system
import torch
from workloads import CLASSES, SAMPLES, WORKLOADS, criterion, data

import fedhet
import fedhet.engines.local
import fedhet.job
import fedhet.record.figures  # all that a run imports is there before its memory is measured
from fedhet.data.toy import toy_task

W1 = WORKLOADS["W1"]


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def clients(number: int, samples: int, cohort: int) -> dict[str, Any]:
    before = _peak()
    federation = data(W1, SAMPLES // samples)[:number]
    rows = fedhet_system.rows(W1, ["rounds=6", f"fraction={cohort / number}"], federation)
    return {"rounds": [sum(row["seconds"].values()) for row in rows], "gib": _peak() - before}


def growth() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        lines = [
            "method=fedavg",
            "method._target_=pieces.Resident",
            "rounds=200",
            f"hydra.run.dir={folder}/run",
        ]
        done = fedhet.run(lines, task=toy_task())
        rows = [json.loads(line) for line in (done.dir / "rounds.jsonl").read_text().splitlines()]
    return {"growth": rows[199]["fedavg.rss"] / rows[9]["fedavg.rss"]}


def trees(workers: int) -> dict[str, Any]:
    rows = fedhet_system.rows(
        W1, ["method._target_=pieces.Streaming", f"engine.workers={workers}", "rounds=4"], data(W1)
    )
    return {"trees": max(row["fedavg.trees"] for row in rows)}


def states(method: str) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)

    def part(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand(n, 784, generator=draw), torch.randint(CLASSES, (n,), generator=draw)

    federation = [fedhet.ClientData(part(20), None, part(5)) for _ in range(500)]
    task = fedhet.Task(
        model=W1.model, criterion=criterion, clients=federation, test=None, classes=CLASSES
    )
    with tempfile.TemporaryDirectory() as folder:
        lines = [
            f"method={method}",
            "rounds=3",
            "eval.every=3",
            "client.epochs=1",
            "client.lr=0.05",
            f"hydra.run.dir={folder}/run",
        ]
        found = fedhet.run(lines, task=task).summary["client_state"]
    return {"gib": _peak(), "state": found["bytes"] / 2**30}


if __name__ == "__main__":
    fedhet_system.prepare()  # pieces.py is found by its name
    torch.set_num_threads(1)
    questions: dict[str, Callable[..., dict[str, Any]]] = {
        "clients": clients,
        "growth": growth,
        "trees": trees,
        "states": states,
    }
    print(
        json.dumps(
            questions[sys.argv[1]](
                *(int(word) if word.isdigit() else word for word in sys.argv[2:])
            )
        )
    )
