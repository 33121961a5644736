"""What the methods' own arithmetic takes, as plain torch in the floor's loop, on W1. Prints JSON.

    python scripts/bench/arithmetic.py

{method: its arithmetic in a round, relative to the floor's round; "generated": FedGMM's generated
samples for each real one; "latents": the time of FedNorm's latents, in inference passes over the
client's data}. A round is ten clients of 60 steps.

Only what the equations of a method require is done; OWN_ARITHMETIC (method_cells.py) describes it.
What a step adds is timed where it happens, as the floor with it minus the floor without it
(terms.py), because its operands push the model out of the caches. Everything is timed client by
client, in alternation, in processor time, and the best time counts: other processes disturb that
least.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable

import torch
from fedhet_system import to_pixels
from method_cells import GENERATED_PER_CLASS, OWN_ARITHMETIC, SERVER_STEPS
from terms import W1, generator, loops
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from workloads import CLASSES, COHORT, Data, TwoNN, criterion, data

from fedhet.core.messages import Update
from fedhet.core.task import ClientData, Samples, Task
from fedhet.core.workspace import Workspace
from fedhet.maths import fedpcl
from fedhet.methods import fedgen
from fedhet.methods.fednorm import FedNorm, FedNormPlugin
from fedhet.stores import MemoryStore

REPS = 5


def alternating(
    pieces: dict[str, Callable[[int], object]], clients: Iterable[int] = range(COHORT)
) -> dict[str, float]:
    """Seconds of each piece, summed over the clients.

    For each client the best of REPS times counts, after one that is not counted.
    """
    seconds = dict.fromkeys(pieces, 0.0)
    for k in clients:
        times: dict[str, list[float]] = {name: [] for name in pieces}
        for _ in range(REPS + 1):
            for name, piece in pieces.items():
                began = time.process_time()
                piece(k)
                times[name].append(time.process_time() - began)
        for name, values in times.items():
            seconds[name] += min(values[1:])
    return seconds


def timed(piece: Callable[[int], object], clients: Iterable[int] = range(COHORT)) -> float:
    """Seconds of one piece, as `alternating` measures them."""
    return alternating({"": piece}, clients)[""]


@torch.no_grad()
def tree_operations() -> tuple[float, float]:
    """Seconds of the float64 mean of a cohort's changes, and of one operation on a float64 tree."""
    cohort = [[p.detach().clone() for p in W1.model().parameters()] for _ in range(COHORT + 1)]
    old = cohort[0]
    total = [p.double() for p in old]

    def add(k: int) -> None:
        pairs = zip(cohort[k + 1], old, strict=True)
        changes = [new.double().sub_(before) for new, before in pairs]
        torch._foreach_add_(total, changes, alpha=0.1)

    return timed(add), timed(lambda _: torch._foreach_mul_(total, 0.9), [0])


@torch.no_grad()
def inference_passes(samples: Data) -> tuple[float, float]:
    """Seconds of an inference pass over the cohort's data, without and with FedPCL's prototypes.

    The second pass ends with the means of the features by class.
    """
    model = TwoNN().eval()

    def prototypes(k: int) -> object:
        x, y = samples[k]
        return fedpcl.prototypes(normalize(model.features(x)), y, CLASSES)

    seconds = alternating({"logits": lambda k: model(samples[k][0]), "prototypes": prototypes})
    return seconds["logits"], seconds["prototypes"]


def generator_steps() -> float:
    """Seconds of FedGen's steps on its generator in a round."""
    network = generator()
    weights, biases = (torch.stack([t] * COHORT) for t in TwoNN().head.parameters())
    adam = torch.optim.Adam(network.parameters(), lr=0.005)
    law = torch.ones(CLASSES)
    shares = torch.full((COHORT, CLASSES), 1 / COHORT)

    def train(_: int) -> None:
        for _ in range(SERVER_STEPS):
            y = torch.multinomial(law, 32, replacement=True)
            noise = torch.randn(32, network.noise_dim)
            z: Tensor = network(noise, y)
            logits = torch.einsum("bd,kcd->kbc", z, weights) + biases[:, None]
            loss = cross_entropy(fedgen.ensemble(logits, shares, y), y)
            loss = loss + fedgen.diversity(z, noise)
            adam.zero_grad()
            loss.backward()
            adam.step()

    return timed(train, [0])


def own_arithmetic(samples: Data) -> dict[str, float]:
    """Each method's own arithmetic in a round, relative to the floor's round."""
    local = alternating(loops(samples))
    mean, operation = tree_operations()
    logits, prototypes = inference_passes(samples)
    floor = local["floor"]
    steps = {name: seconds - floor for name, seconds in local.items()}
    steps["feddiskab"] = steps["feddisk"]
    # These two take further steps, so nothing is subtracted.
    steps["ditto"] = local["fedprox"]
    steps["fedala"] = local["fedala"]
    rounds = {
        "fednorm": logits,
        "fedpcl": prototypes,
        "fedgen": generator_steps(),
        "fedsa": 5 * mean,
        "sgdm": mean,
        "scaffold": 5 * mean,
        "fedavgm": 3 * operation,
        **dict.fromkeys(("fedadam", "fedyogi", "fedadagrad"), 12 * operation),
    }
    return {
        method: max(0.0, steps.get(method, 0.0) + rounds.get(method, 0.0)) / floor
        for method in OWN_ARITHMETIC
    }


def generated(samples: Data) -> float:
    """What the clients lack of the classes that anyone has, for each real sample."""
    counts = torch.stack([y.bincount(minlength=CLASSES) for _, y in samples])
    missing = (GENERATED_PER_CLASS - counts).clamp(min=0) * (counts.sum(0) > 0)
    return float(missing.sum() / counts.sum())


@torch.no_grad()
def latents(samples: Data) -> float:
    """FedNorm's time relative to that of a plain pass, the median over clients."""
    task = Task(
        model=W1.model,
        criterion=criterion,
        clients=[ClientData(Samples(*pair)) for pair in samples],
        test=None,
        classes=CLASSES,
    )
    workspace = Workspace(task, device=torch.device("cpu"), seed=0)
    plugin = FedNormPlugin()
    client = FedNorm.client_cls(workspace, [plugin], MemoryStore())
    ratios = []
    for pid, (x, y) in enumerate(samples):
        client.pid = pid
        update = Update(pid, len(y))
        seconds = alternating(
            {
                "latents": lambda _, update=update: plugin.finish(update),
                "pass": lambda _, x=x: workspace.model(x),
            },
            [0],
        )  # type: ignore[misc]
        ratios.append(seconds["latents"] / seconds["pass"])
    return statistics.median(ratios)


if __name__ == "__main__":
    torch.set_num_threads(1)
    clients = to_pixels(data(W1)[:COHORT])
    figures = own_arithmetic(clients)
    print(json.dumps({**figures, "generated": generated(clients), "latents": latents(clients)}))
