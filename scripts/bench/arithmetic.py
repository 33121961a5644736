"""What the methods' own arithmetic takes, as plain torch in the floor's loop, on W1. Prints JSON.

    python scripts/bench/arithmetic.py

{method: seconds per round, "generated": FedGMM's generated samples for each real one, "latents": what FedNorm's latents take,
in inference passes over the client's data}. A round is ten clients of 60 steps. Only what the method's equations need is
done, each on whole lists of tensors; WORDS (cells.py) says what. An operation of each step is timed where it happens, as the
best round of the floor with it less the best without it: its operands push the model out of the caches.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import torch
from cells import GENERATED_PER_CLASS, WORDS
from fedhet_system import pixels
from floor import Extra, trainer
from torch import Tensor
from workloads import CLASSES, COHORT, WORKLOADS, Data, criterion, data

from fedhet.messages import Update
from fedhet.methods.fednorm import FedNormClient, FedNormPlugin
from fedhet.site import Site
from fedhet.state import MemoryStore
from fedhet.task import ClientData, Samples, Task

W1, REPS = WORKLOADS["W1"], 5


def alternating(pieces: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Seconds of each piece in each repetition, after one that is not counted."""
    spent: dict[str, list[float]] = {name: [] for name in pieces}
    for _ in range(REPS + 1):
        for name, piece in pieces.items():
            began = time.perf_counter()
            piece()
            spent[name].append(time.perf_counter() - began)
    return {name: times[1:] for name, times in spent.items()}


def in_steps(samples: Data) -> dict[str, float]:
    """Seconds per round of what is done in each of its steps."""
    x, d, total = ([p.detach().clone() for p in W1.model().parameters()] for _ in range(3))
    weights, losses, index = torch.ones(600), torch.ones(W1.batch), torch.arange(W1.batch)

    def momentum(params: list[Tensor], grads: list[Tensor]) -> None:
        torch._foreach_mul_(d, 0.9)
        torch._foreach_add_(d, grads)

    extras: dict[str, Extra] = {
        "floor": lambda params, grads: None, "sgdm": momentum,
        "fedprox": lambda params, grads: torch._foreach_add_(grads, torch._foreach_sub(params, x), alpha=0.01),
        "fedlex": lambda params, grads: torch._foreach_mul_(grads, d),
        "scaffold": lambda params, grads: torch._foreach_add_(grads, d),
        "feddisk": lambda params, grads: losses * weights[index]}
    loops = {name: trainer(W1, samples, extra) for name, extra in extras.items()}
    spent = alternating({name: lambda loop=loop: loop(x, list(range(COHORT)), total, 0.1) for name, loop in loops.items()})  # type: ignore[misc]
    return {name: max(0.0, min(times) - min(spent["floor"])) for name, times in spent.items()}


@torch.no_grad()
def on_trees() -> tuple[float, float]:
    """Seconds of the float64 mean of a cohort's changes, and of one operation on a float64 tree."""
    cohort = [[p.detach().clone() for p in W1.model().parameters()] for _ in range(COHORT + 1)]
    total = [p.double() for p in cohort[0]]

    def mean() -> None:
        for tree in cohort[1:]:
            torch._foreach_add_(total, [new.double().sub_(old) for new, old in zip(tree, cohort[0], strict=True)], alpha=0.1)

    spent = alternating({"mean": mean, "operation": lambda: torch._foreach_mul_(total, 0.9)})
    return statistics.median(spent["mean"]), statistics.median(spent["operation"])


@torch.no_grad()
def inference(samples: Data) -> float:
    """Seconds of a pass over the cohort's data."""
    model = W1.model().eval()
    return statistics.median(alternating({"pass": lambda: [model(x) for x, _ in samples[:COHORT]]})["pass"])


def own(samples: Data) -> dict[str, float]:
    """Seconds per round of each method's own arithmetic."""
    steps, (mean, operation) = in_steps(samples), on_trees()
    rounds = {"fednorm": inference(samples), "fedsa": 5 * mean, "sgdm": mean, "scaffold": 5 * mean, "fedavgm": 3 * operation,
              **dict.fromkeys(("fedadam", "fedyogi", "fedadagrad"), 12 * operation)}
    steps["feddiskab"] = steps["feddisk"]
    return {method: steps.get(method, 0.0) + rounds.get(method, 0.0) for method in WORDS}


def generated(samples: Data) -> float:
    missing = [(GENERATED_PER_CLASS - y.bincount(minlength=CLASSES)).clamp(min=0).sum() for _, y in samples]
    return sum(map(int, missing)) / sum(len(y) for _, y in samples)


@torch.no_grad()
def latents(samples: Data) -> float:
    """The median over clients of FedNorm's time by that of a plain pass."""
    task = Task(W1.model, criterion, [ClientData(Samples(*pair)) for pair in samples], None, CLASSES)
    site, plugin = Site(task, device=torch.device("cpu"), seed=0), FedNormPlugin()
    client, found = FedNormClient(site, [plugin], MemoryStore()), []
    for client.pid, (x, y) in enumerate(samples):
        update = Update(client.pid, len(y))
        spent = alternating({"latents": lambda update=update: plugin.sending(update), "pass": lambda x=x: site.model(x)})  # type: ignore[misc]
        found.append(statistics.median(spent["latents"]) / statistics.median(spent["pass"]))
    return statistics.median(found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    clients = pixels(data(W1))
    print(json.dumps({**own(clients), "generated": generated(clients), "latents": latents(clients)}))
