"""What the methods' own arithmetic takes, as plain torch in the floor's loop, on W1. Prints JSON.

    python scripts/bench/arithmetic.py

{method: its arithmetic in a round by the floor's round, "generated": FedGMM's generated samples for
each real one, "latents": what FedNorm's latents take, in inference passes over the client's data}.
A round is ten clients of 60 steps. Only what the method's equations need is done; WORDS (cells.py)
says what. What a step adds is timed where it happens, as the floor with it less the floor without
it (terms.py): its operands push the model out of the caches. Everything is timed client by client,
in alternation, by the processor's clock, and the best time counts: another process disturbs that
least."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable

import torch
from cells import GENERATED_PER_CLASS, SERVER_STEPS, WORDS
from fedhet_system import pixels
from terms import W1, generator, loops
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from workloads import CLASSES, COHORT, Data, TwoNN, criterion, data

from fedhet.maths import fedgen, fedpcl
from fedhet.messages import Update
from fedhet.methods.fednorm import FedNormClient, FedNormPlugin
from fedhet.site import Site
from fedhet.state import MemoryStore
from fedhet.task import ClientData, Samples, Task

REPS = 5


def alternating(
    pieces: dict[str, Callable[[int], object]], clients: Iterable[int] = range(COHORT)
) -> dict[str, float]:
    """Seconds of each piece: the sum over the clients of the best of REPS times, after one that is
    not counted."""
    spent = dict.fromkeys(pieces, 0.0)
    for k in clients:
        found: dict[str, list[float]] = {name: [] for name in pieces}
        for _ in range(REPS + 1):
            for name, piece in pieces.items():
                began = time.process_time()
                piece(k)
                found[name].append(time.process_time() - began)
        for name, times in found.items():
            spent[name] += min(times[1:])
    return spent


@torch.no_grad()
def on_trees() -> tuple[float, float]:
    """Seconds of the float64 mean of a cohort's changes, and of one operation on a float64 tree."""
    cohort = [[p.detach().clone() for p in W1.model().parameters()] for _ in range(COHORT + 1)]
    total = [p.double() for p in cohort[0]]

    def add(k: int) -> None:
        torch._foreach_add_(
            total,
            [new.double().sub_(old) for new, old in zip(cohort[k + 1], cohort[0], strict=True)],
            alpha=0.1,
        )

    return (
        alternating({"": add})[""],
        alternating({"": lambda k: torch._foreach_mul_(total, 0.9)}, [0])[""],
    )


@torch.no_grad()
def passes(samples: Data) -> tuple[float, float]:
    """Seconds of an inference pass over the cohort's data, and of one that ends with the means of
    its features by class."""
    model = TwoNN().eval()
    found = alternating(
        {
            "logits": lambda k: model(samples[k][0]),
            "prototypes": lambda k: fedpcl.prototypes(
                normalize(model.features(samples[k][0])), samples[k][1], CLASSES
            ),
        }
    )
    return found["logits"], found["prototypes"]


def generating() -> float:
    """Seconds of FedGen's steps on its generator in a round."""
    made, (weights, biases) = (
        generator(),
        (torch.stack([t] * COHORT) for t in TwoNN().head.parameters()),
    )
    adam, law, shares = (
        torch.optim.Adam(made.parameters(), lr=0.005),
        torch.ones(CLASSES),
        torch.full((COHORT, CLASSES), 1 / COHORT),
    )

    def train(_: int) -> None:
        for _ in range(SERVER_STEPS):
            y, noise = torch.multinomial(law, 32, replacement=True), torch.randn(32, made.noise_dim)
            z: Tensor = made(noise, y)
            logits = torch.einsum("bd,kcd->kbc", z, weights) + biases[:, None]
            loss = cross_entropy(fedgen.ensemble(logits, shares, y), y) + fedgen.diversity(z, noise)
            adam.zero_grad()
            loss.backward()
            adam.step()

    return alternating({"": train}, [0])[""]


def own(samples: Data) -> dict[str, float]:
    """Each method's own arithmetic in a round, by the floor's round."""
    local, (mean, operation), (logits, prototypes) = (
        alternating(loops(samples)),
        on_trees(),
        passes(samples),
    )
    floor = local["floor"]
    steps = {name: seconds - floor for name, seconds in local.items()}
    steps |= {
        "feddiskab": steps["feddisk"],
        "ditto": local["fedprox"],
        "fedala": local["fedala"],
    }  # two have further steps
    rounds = {
        "fednorm": logits,
        "fedpcl": prototypes,
        "fedgen": generating(),
        "fedsa": 5 * mean,
        "sgdm": mean,
        "scaffold": 5 * mean,
        "fedavgm": 3 * operation,
        **dict.fromkeys(("fedadam", "fedyogi", "fedadagrad"), 12 * operation),
    }
    return {
        method: max(0.0, steps.get(method, 0.0) + rounds.get(method, 0.0)) / floor
        for method in WORDS
    }


def generated(samples: Data) -> float:
    """What the clients lack of the classes that somebody has, for each real sample."""
    counts = torch.stack([y.bincount(minlength=CLASSES) for _, y in samples])
    missing = (GENERATED_PER_CLASS - counts).clamp(min=0) * (counts.sum(0) > 0)
    return float(missing.sum() / counts.sum())


@torch.no_grad()
def latents(samples: Data) -> float:
    """The median over clients of FedNorm's time by that of a plain pass."""
    task = Task(
        W1.model, criterion, [ClientData(Samples(*pair)) for pair in samples], None, CLASSES
    )
    site, plugin = Site(task, device=torch.device("cpu"), seed=0), FedNormPlugin()
    client, found = FedNormClient(site, [plugin], MemoryStore()), []
    for client.pid, (x, y) in enumerate(samples):
        update = Update(client.pid, len(y))
        spent = alternating(
            {
                "latents": lambda _, update=update: plugin.sending(update),
                "pass": lambda _, x=x: site.model(x),
            },
            [0],
        )  # type: ignore[misc]
        found.append(spent["latents"] / spent["pass"])
    return statistics.median(found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    clients = pixels(data(W1)[:COHORT])
    print(
        json.dumps({**own(clients), "generated": generated(clients), "latents": latents(clients)})
    )
