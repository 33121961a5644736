"""What the methods' own arithmetic takes, as plain torch on W1's model and data, apart from fedhet. Prints JSON.

    python scripts/bench/arithmetic.py

{method: seconds per round, "generated": FedGMM's generated samples for each real one, "latents": what FedNorm's latents take,
in inference passes over the client's data}. A round is ten clients of 60 steps. Only the operations that the
method's equations need are counted, each on whole lists of tensors; WORDS (cells.py) says which.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import torch
from cells import GENERATED_PER_CLASS, WORDS
from fedhet_system import pixels
from torch import Tensor
from workloads import CLASSES, COHORT, WORKLOADS, criterion, data

from fedhet.messages import Update
from fedhet.methods.fednorm import FedNormClient, FedNormPlugin
from fedhet.site import Site
from fedhet.state import MemoryStore
from fedhet.task import ClientData, Samples, Task

W1 = WORKLOADS["W1"]
STEPS = COHORT * 60


def seconds(work: Callable[[], object], times: int, reps: int = 5) -> float:
    """The median of the repetitions, for so many times the work."""
    spent = []
    for _ in range(reps + 1):
        began = time.perf_counter()
        for _ in range(times):
            work()
        spent.append(time.perf_counter() - began)
    return statistics.median(spent[1:])


@torch.no_grad()
def own(samples: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    model = W1.model()
    w, x, g, d = ([p.detach().clone() for p in model.parameters()] for _ in range(4))
    wide = [p.double() for p in w]
    weights, losses, index = torch.ones(600), torch.ones(10), torch.arange(10)
    add = seconds(lambda: torch._foreach_add_(g, d), STEPS)
    add_wide = seconds(lambda: torch._foreach_add_(wide, wide), 1)
    tree = seconds(lambda: [a.double().sub_(b) for a, b in zip(w, x, strict=True)], 1) + add_wide  # a difference, summed
    steps = {
        "fedprox": seconds(lambda: torch._foreach_add_(g, torch._foreach_sub(w, x), alpha=0.01), STEPS),
        "fedlex": seconds(lambda: torch._foreach_mul_(g, d), STEPS),
        "sgdm": add + seconds(lambda: torch._foreach_mul_(d, 0.9), STEPS) + COHORT * tree,
        "scaffold": add + COHORT * 5 * tree,
        "feddisk": seconds(lambda: losses * weights[index], STEPS),
        "fednorm": sum(seconds(lambda x=x: model(x), 1) for x, _ in samples[:COHORT]),  # type: ignore[misc]
        "fedsa": 5 * COHORT * tree,
    }
    servers = {"fedavgm": 3 * add_wide} | dict.fromkeys(("fedadam", "fedyogi", "fedadagrad"), 12 * add_wide)
    return dict.fromkeys(WORDS, 0.0) | steps | servers | {"feddiskab": steps["feddisk"]}


def generated(samples: list[tuple[Tensor, Tensor]]) -> float:
    missing = [(GENERATED_PER_CLASS - y.bincount(minlength=CLASSES)).clamp(min=0).sum() for _, y in samples]
    return sum(map(int, missing)) / sum(len(y) for _, y in samples)


def latents(samples: list[tuple[Tensor, Tensor]]) -> float:
    """The median over clients of FedNorm's time by that of the pass that follows it."""
    task = Task(W1.model, criterion, [ClientData(Samples(*pair)) for pair in samples], None, CLASSES)
    site, plugin = Site(task, device=torch.device("cpu"), seed=0), FedNormPlugin()
    client = FedNormClient(site, [plugin], MemoryStore())
    found = []
    for pid in range(len(samples)):
        client.pid, x = pid, site.train_data(pid).x
        with torch.no_grad():
            site.model.eval()
            passed = seconds(lambda x=x: site.model(x), 1)  # type: ignore[misc]
        found.append(seconds(lambda pid=pid: plugin.sending(Update(pid, 600)), 1) / passed)  # type: ignore[misc]
    return statistics.median(found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    clients = pixels(data(W1))
    print(json.dumps({**own(clients), "generated": generated(clients), "latents": latents(clients)}))
