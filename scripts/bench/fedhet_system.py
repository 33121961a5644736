"""fedhet on a workload, by its public interface. Prints JSON.

    python scripts/bench/fedhet_system.py W1 [overrides ...]

The cohorts are fedhet's own (a function of the seed); all clients have 600 samples, so that each round is the same work.
"""

from __future__ import annotations

import json
import sys
import tempfile

from workloads import CLASSES, COHORT, LR, WORKLOADS, Data, Workload, criterion, data

import fedhet


def run(workload: Workload, overrides: list[str], samples: Data | None = None) -> list[dict[str, float]]:
    """`seconds` of each timed round, as rounds.jsonl splits them."""
    samples = samples or data(workload)
    clients = [fedhet.ClientData(train=pair) for pair in samples]
    task = fedhet.Task(model=workload.model, criterion=criterion, clients=clients, test=None, classes=CLASSES)
    with tempfile.TemporaryDirectory() as folder:
        settings = ["method=fedavg", f"rounds={workload.rounds + 1}", f"fraction={COHORT / len(samples)}", "eval.clients=false",
                    "client.epochs=1", f"client.lr={LR}", f"client.batch_size={workload.batch}", f"hydra.run.dir={folder}/run"]
        done = fedhet.run([*settings, *overrides], task=task)
        rows = [json.loads(line) for line in (done.dir / "rounds.jsonl").read_text().splitlines()]
    return [row["seconds"] for row in rows if row["phase"] == "train"][1:]


if __name__ == "__main__":
    found = run(WORKLOADS[sys.argv[1]], sys.argv[2:])
    print(json.dumps({"rounds": [sum(seconds.values()) for seconds in found], "split": found}))
