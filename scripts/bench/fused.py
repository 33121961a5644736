"""Measures what clients and runs gain by training in one batch (fused). Prints JSON.

python scripts/bench/fused.py steps INPUTS HIDDEN BATCH RUNS CLIENTS FUSED
    {"step": seconds of a client's gradient step} in training rounds of FedAvg in this process, on
    one thread. The network is INPUTS-HIDDEN-10 (HIDDEN may be 200-200), the batch size BATCH. RUNS
    runs train side by side, with CLIENTS clients each and engine.fused=FUSED
python scripts/bench/fused.py rounds CLIENTS FUSED
    {"round": seconds of a round with 8 steps of 64-64-10 and batches of 32, "evaluation": seconds
    of its evaluation}, in which every client scores the global model on two sets of 12 samples
python scripts/bench/fused.py digits METHOD FUSED
    {"total": seconds of 12 rounds of METHOD in the default job}
python scripts/bench/fused.py picture
    draws docs/images/fused.png: client steps per second against the number of clients
"""

from __future__ import annotations

import os
import tempfile
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

import pandas
import torch
from harness import alternate, answer
from matplotlib import pyplot

import fedhet
from fedhet.core.targets import cross_entropy
from fedhet.engines.fused.scheduler import Scheduler
from fedhet.models import MLP

STEPS, EPOCHS, ROUNDS = 20, 10, 5
NUMBERS = [(1, 1), (1, 2), (1, 5), (1, 10), (2, 10), (4, 10), (6, 10), (10, 10)]  # runs, clients
NETWORKS = {"64-64-10": ("64", "64", "32"), "784-64-10": ("784", "64", "20")}
PICTURE = Path(__file__).parents[2] / "docs" / "images" / "fused.png"


def _measured(lines: list[str], task: Any = None) -> pandas.DataFrame:
    """Return the seconds of each round of a run on one thread."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, redirect_stderr(Path(os.devnull).open("w")):
        quiet = [f"hydra.run.dir={folder}/run", "figures=false", "checkpoint.every=null"]
        return fedhet.run([*lines, *quiet], task=task).rounds.filter(regex="^seconds")


def _task(inputs: int, hidden: list[int], clients: int, train: int, others: int) -> fedhet.Task:
    """Return a task whose clients have `train` samples, and `others` for each of their scores."""
    draws = torch.Generator().manual_seed(0)

    def samples(n: int) -> Any:
        return (torch.rand(n, inputs, generator=draws), torch.arange(n) % 10) if n else None

    return fedhet.Task(
        model=lambda: MLP(shape=(inputs,), classes=10, hidden=hidden),
        criterion=cross_entropy,
        clients=[
            fedhet.ClientData(samples(train), samples(others), samples(others))
            for _ in range(clients)
        ],
        test=None,
        classes=10,
    )


def steps(inputs: int, hidden: str, batch: int, runs: int, clients: int, fused: str) -> Any:
    """Measure the seconds of a gradient step."""
    task = _task(inputs, [*map(int, str(hidden).split("-"))], clients, STEPS * batch, 0)
    lines = [
        "method=fedavg",
        f"rounds={ROUNDS}",
        f"client.epochs={EPOCHS}",
        f"client.batch_size={batch}",
        f"engine.fused={fused}",
        "eval.clients=false",
    ]
    works = [partial(_measured, [*lines, f"seed={seed}"], task) for seed in range(runs)]
    # One after another, or side by side.
    found = [work() for work in works] if fused == "off" else Scheduler().gather(works)
    rows = [seconds.sum(axis=1)[2:] for seconds in found]
    if fused == "off":
        seconds = sum(float(row.median()) for row in rows)
    else:  # every run waits for the slowest run, so their rounds have the same seconds
        seconds = float(rows[0].median())
    return {"step": seconds / (STEPS * EPOCHS * clients * runs)}


def rounds(clients: int, fused: str) -> Any:
    """Measure rounds and their evaluations."""
    lines = ["method=fedavg", "rounds=12", "client.batch_size=32", f"engine.fused={fused}"]
    seconds = _measured([*lines, "client.epochs=1"], _task(64, [64], clients, 8 * 32, 12))[2:]
    evaluations = seconds["seconds.evaluate"].median()
    return {"evaluation": float(evaluations), "round": float(seconds.sum(axis=1).median())}


def digits(method: str, fused: str) -> Any:
    """Measure the rounds of a run of the default job."""
    _measured(["rounds=1", f"engine.fused={fused}"])  # what only the first run in a process pays
    found = _measured([f"method={method}", "rounds=12", f"engine.fused={fused}"])
    return {"total": float(found.sum().sum())}


def picture() -> dict[str, Any]:
    """Draw client steps per second; each point is measured in a process of its own."""
    points: dict[str, list[float]] = {}
    figure, axes = pyplot.subplots(figsize=(5, 3), layout="constrained")
    for name, network in NETWORKS.items():
        for fused, how, line in (("60", "as one", "-o"), ("off", "one after another", "--")):
            label = f"{name}, {how}"
            words = {runs * n: [*network, f"{runs}", f"{n}", fused] for runs, n in NUMBERS}
            commands = {f"{n} clients": ["fused.py", "steps", *each] for n, each in words.items()}
            points[label] = [1 / one.value("step") for one in alternate(commands, 1).values()]
            axes.plot([*words], points[label], line, label=label)
    axes.set(xscale="log", xlabel="clients", ylabel="client steps per second", ylim=0)
    axes.legend(fontsize=7)
    figure.savefig(PICTURE, dpi=120)
    return points


if __name__ == "__main__":
    answer(steps, rounds, digits, picture)
