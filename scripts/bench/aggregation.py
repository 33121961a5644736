"""Measures the server's aggregation, relative to fedhet's float64 weighted mean. Prints JSON.

    python scripts/bench/aggregation.py ratios [CLIENTS [REPS]]
        {"seconds": the time of the mean, "of_copy": the mean / a plain copy of the same trees into
        one tree, "fedsa": FedSA / the mean, "bytes": the size of the trees}

The plain copy shows the cost of the memory traffic itself. The trees of CLIENTS (20) clients have
ResNet-18's 11.2 million trained parameters: one initialisation, plus noise of standard deviation
0.01 for each client. There is one thread, and the components alternate. Times are noisy; each ratio
is the median over the repetitions.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from harness import answer, timed

from fedhet.core import trees
from fedhet.core.kernel import Message, Step, Update
from fedhet.core.messages import LocalSettings
from fedhet.core.task import ClientData, Samples, Task
from fedhet.core.workspace import Workspace
from fedhet.methods.fedsa import FedSA
from fedhet.models import ResNet18

LOCAL = LocalSettings(lr=0.1)


def first_step(clients: int) -> Step:
    """Return a step with ResNet-18; its clients never train."""
    sample = Samples(torch.zeros(1, 3, 32, 32), torch.zeros(1, dtype=torch.int64))
    task = Task(
        model=lambda: ResNet18(shape=(3, 32, 32), classes=10, norm="batch"),
        criterion=lambda output, y: output[:, 0],
        clients=[ClientData(sample)] * clients,
        test=None,
        classes=10,
    )
    workspace = Workspace(task, device=torch.device("cpu"), seed=0)
    return Step(workspace=workspace, phase="train", number=1, round=1, local=LOCAL)


def received(step: Step, clients: int) -> list[Update]:
    """Return the updates of a round, in their form after the server's checks."""
    draw = torch.Generator().manual_seed(0)
    old = trees.pick(step.workspace.initial, step.workspace.trained)
    updates = []
    for pid in range(clients):
        weights = {}
        for name, t in old.items():
            weights[name] = torch.randn(t.shape, generator=draw).mul_(0.01).add_(t)
        change, sent = trees.Difference(weights, old), Message("train", 1, 1, pid, LOCAL, old)
        updates.append(Update(pid, 1, 1 / clients, weights, change, {}, {}, sent))
    return updates


def ratios(clients: int = 20, reps: int = 5) -> dict[str, Any]:
    """Compare FedSA with the mean, and the mean with a plain copy."""
    step = first_step(clients)
    old = trees.pick(step.workspace.initial, step.workspace.trained)
    updates = received(step, clients)
    tensors = [list(update.weights.values()) for update in updates]
    target = [t.clone() for t in tensors[0]]

    def copy() -> None:
        for each in tensors:
            torch._foreach_copy_(target, each)

    components = {
        "copy": copy,
        "mean": lambda: trees.mean((update.change, update.weight) for update in updates),
        "fedsa": lambda: FedSA().merge(step, {}, old, iter(updates)),
    }
    copied, mean, fedsa = timed(components, reps).values()
    return {
        "seconds": statistics.median(mean),
        "of_copy": statistics.median(a / b for a, b in zip(mean, copied, strict=True)),
        "fedsa": statistics.median(a / b for a, b in zip(fedsa, mean, strict=True)),
        "bytes": sum(trees.nbytes(update.weights) for update in updates),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    answer(ratios)
