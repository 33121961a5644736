"""Measures what clients and runs gain by training in one batch (fused). Prints JSON.

python scripts/bench/fused.py steps INPUTS HIDDEN BATCH RUNS CLIENTS FUSED
    {"step": seconds of a client's gradient step} in training rounds of FedAvg in this process, on
    one thread. The network is INPUTS-HIDDEN-10 (HIDDEN may be 200-200), the batch size BATCH. RUNS
    runs train side by side, with CLIENTS clients each and engine.fused=FUSED
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


def steps(inputs: int, hidden: str, batch: int, runs: int, clients: int, fused: str) -> Any:
    """Measure the seconds of a gradient step."""
    torch.set_num_threads(1)
    draws = torch.Generator().manual_seed(0)
    widths = [int(width) for width in str(hidden).split("-")]

    def one(seed: int, folder: str) -> Any:
        samples = [
            (torch.rand(STEPS * batch, inputs, generator=draws), torch.arange(STEPS * batch) % 10)
            for _ in range(clients)
        ]
        task = fedhet.Task(
            model=lambda: MLP(shape=(inputs,), classes=10, hidden=widths),
            criterion=cross_entropy,
            clients=[fedhet.ClientData(each) for each in samples],
            test=None,
            classes=10,
        )
        lines = [
            "method=fedavg",
            f"rounds={ROUNDS}",
            f"client.epochs={EPOCHS}",
            f"client.batch_size={batch}",
            f"engine.fused={fused}",
            f"seed={seed}",
            f"hydra.run.dir={folder}/{seed}",
            "eval.clients=false",
            "figures=false",
            "checkpoint.every=null",
        ]
        return partial(fedhet.run, lines, task=task)

    with tempfile.TemporaryDirectory() as folder, redirect_stderr(Path(os.devnull).open("w")):
        works = [one(seed, folder) for seed in range(runs)]
        # One after another, or side by side.
        found = [work() for work in works] if fused == "off" else Scheduler().gather(works)
        rows = [run.rounds.filter(regex="^seconds").sum(axis=1)[2:] for run in found]
    if fused == "off":
        seconds = sum(float(row.median()) for row in rows)
    else:  # every run waits for the slowest run, so their rounds have the same seconds
        seconds = float(rows[0].median())
    return {"step": seconds / (STEPS * EPOCHS * clients * runs)}


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
    answer(steps, picture)
