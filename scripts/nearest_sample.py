"""An attack on clients' replies: which training sample is nearest to a statistic?

    python scripts/nearest_sample.py method=fedgmm experiment=digits [privacy.min_count=0]

The script makes a run in this process, reads the clients' replies as the server does, and compares
each statistic with the samples behind it:

    FedGMM           the means of its components, with images
    FedPCL, FedNorm  prototypes and mean latents, with the features of images in the client's own
                     network (the attacker is assumed to know this network)
    FedDisk          a MADE is not a statistic. The attacker computes the image that the MADE
                     expects (each pixel given the pixels before it), and by how much training has
                     raised the likelihood of a sample.
    FedGen           label counts belong to no image. A copy is a count of one sample, and the
                     attacker guesses which classes a client has.

It prints, for all replies together:

    sent    the number of statistics that were sent; if there are none, it prints a line instead
    copies  the fraction of them that equal a training sample, up to 1e-3 of its norm
    auc     how well the distance to the nearest statistic separates training samples from others:
            the probability that a client's training sample of a class is nearer than a sample of
            the same class in the global test set. .5 is chance.
            FedNorm: the other samples are the client's own held-out data.
            FedDisk: the probability that its likelihood was raised by more.
            FedGen: the probability that a class with samples at the client has a larger count than
            a class without.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout

from fedhet.core.client.client import FedClient
from fedhet.core.messages import Failure, Upload
from fedhet.core.metrics import FORWARD_BATCH
from fedhet.core.server.loop import Loop
from fedhet.core.server.phases import locate
from fedhet.core.task import Samples
from fedhet.methods.feddisk import SLOT, densities
from fedhet.methods.fedgmm.mixtures import MIXTURES
from fedhet.runs import config
from fedhet.runs.cli.exits import report_error
from fedhet.runs.job import Job
from fedhet.runs.privacy.account import Account
from fedhet.runs.process import pinned_threads
from fedhet.runs.stores import MemoryStore

COUNTS, PROTOTYPES, Z = "fedgen.counts", "fedpcl.prototypes", "fednorm.z"
TOLERANCE = 1e-3


class Target(NamedTuple):
    """Statistics from a reply, and the samples to compare them with.

    Attributes:
        statistics: the statistics (k, d).
        members: the samples behind the statistics (n, d).
        others: other samples of the same kind (m, d).
        scores: scores of members (n,) and others (m,), if the attacker separates them by something
            other than the distance to the nearest statistic. Members should have smaller scores.
    """

    statistics: Tensor
    members: Tensor
    others: Tensor
    scores: tuple[Tensor, Tensor] | None = None


def measure(overrides: list[str]) -> dict[str, float | None]:
    """Make the run, and return `sent`, `copies` and `auc`; the last two are None if sent is 0.

    Raises:
        RuntimeError: a client failed.
    """
    copies: list[Tensor] = []
    aucs: list[Tensor] = []  # for each target, one AUC per member
    for target in attacked(overrides):
        distances = torch.cdist(target.statistics, target.members)
        relative = distances / target.members.norm(dim=1).clamp_min(1e-12)
        copies.append((relative <= TOLERANCE).any(1).double())
        if len(target.others):
            nearest, elsewhere = target.scores or (
                distances.amin(0),
                torch.cdist(target.statistics, target.others).amin(0),
            )
            gap = elsewhere[None] - nearest[:, None]
            aucs.append(((gap > 0).double() + (gap == 0).double() / 2).mean(1))
    if not copies:
        return {"sent": 0.0, "copies": None, "auc": None}
    found = torch.cat(copies)
    auc = float(torch.cat(aucs).mean()) if aucs else None
    return {"sent": float(len(found)), "copies": float(found.mean()), "auc": auc}


def attacked(overrides: list[str]) -> Iterator[Target]:
    """Make the run, and yield the targets in each reply."""
    settings = config.compose(overrides)
    with pinned_threads(settings.run.engine.threads):
        job = Job(settings)
        strategy, store = job.strategy, MemoryStore()
        loop = Loop(strategy, [Account(job.workspace.noise)] if job.workspace.noise else [])
        number = 0
        while locate(strategy.timetable, number + 1):
            number += 1
            replies, step = [], strategy.plan(number)
            loop.begin(step)
            for msg in step.messages:
                client = job.client(store)
                reply = client.handle(msg)
                if isinstance(reply, Failure):
                    raise RuntimeError(str(reply))
                yield from targets(client, reply)
                replies.append(reply)
            strategy.finish_step(step, replies, loop.accept)


def targets(client: FedClient, reply: Upload) -> Iterator[Target]:
    """Yield the targets in an update; the client must still hold the network that made it."""
    workspace, own = client.workspace, client.workspace.task.clients[client.pid]
    test = workspace.task.test
    if test is None:
        raise SystemExit("the attack needs samples of a global test set")
    if MIXTURES in reply.extras:
        mixtures = reply.tree(MIXTURES)
        images = (flat(workspace.floating(part)) for part in (own.train, test))
        yield from by_class(mixtures["mu"], mixtures["label"], *images)
    if PROTOTYPES in reply.extras:
        means = reply.tree(PROTOTYPES)
        seen = (latents(client, workspace.prepared(part), unit=True) for part in (own.train, test))
        label = torch.arange(len(means["mean"]))
        yield from by_class(means["mean"][means["has"]], label[means["has"]], *seen)
    if Z in reply.extras and len(z := reply.tensor(Z)):
        held_out = [part for part in (own.val, own.test) if part is not None and len(part)]
        members = latents(client, workspace.prepared(own.train)).x
        others = [latents(client, workspace.prepared(part)).x for part in held_out]
        yield Target(z[None], members, torch.cat([members[:0], *others]))
    if COUNTS in reply.extras:
        counts = reply.counts(COUNTS, reply.num_examples, workspace.task.classes)
        yield from of_counts(counts, own.train.y)
    if client.msg.slot == SLOT and reply.weights:
        images = (flat(workspace.floating(part)) for part in (own.train, test))
        yield from of_density(client, reply, *images)


def of_counts(sent: Tensor, label: Tensor) -> Iterator[Target]:
    """Yield the targets in label counts: counts of one sample, and the classes that exist."""
    counts = sent.double()[:, None]
    yield Target(counts[sent > 0], counts.new_ones(1, 1), counts[:0])
    has = label.bincount(minlength=len(sent)) > 0
    yield Target(counts[:0], counts[has], counts[~has], (-counts[has, 0], -counts[~has, 0]))


@torch.no_grad()
def of_density(
    client: FedClient, reply: Upload, members: Samples, others: Samples
) -> Iterator[Target]:
    """Yield the targets in a MADE; the attacker knows the MADE before this training."""
    (plugin,) = (component for component in client.plugins if component.name == "feddisk")
    x, own = members.x, plugin.settings
    masks = densities.masks(x.shape[1], own["hidden"], own["masks"], client.workspace.seed)
    expected = torch.zeros_like(x[:1])
    for d in range(x.shape[1]):
        expected[:, d] = densities.logits(reply.weights, masks, expected)[:, d].sigmoid()
    yield Target(expected, x, x[:0])
    for c in members.y.unique():
        own, rest = x[members.y == c], others.x[others.y == c]
        before, after = (
            [densities.nll(made, masks, part) for part in (own, rest)]
            for made in (client.msg.weights, reply.weights)
        )
        raised = (after[0] - before[0], after[1] - before[1])
        yield Target(expected[:0], own, rest, raised)


def by_class(
    statistics: Tensor, label: Tensor, members: Samples, others: Samples
) -> Iterator[Target]:
    """Yield a target for each class that has statistics."""
    for c in label.unique():
        own, rest = members.x[members.y == c], others.x[others.y == c]
        yield Target(statistics[label == c], own, rest)


def flat(samples: Samples) -> Samples:
    """Return the samples as vectors."""
    return Samples(samples.x.flatten(1), samples.y)


@torch.no_grad()
def latents(client: FedClient, samples: Samples, *, unit: bool = False) -> Samples:
    """Return the inputs of the last layer of the client's network, with length 1 if `unit`."""
    model = client.workspace.model.eval()
    x = torch.cat([model.features(x).flatten(1) for x in samples.x.split(FORWARD_BATCH)])  # type: ignore[operator]
    return Samples(normalize(x) if unit else x, samples.y)


def main(overrides: list[str]) -> int:
    """Print the results of the attack; return the exit code."""
    try:
        found = measure(overrides)
    except Exception as error:  # noqa: BLE001 -- the last place that can report it in one line
        return report_error(error)
    if not found["sent"]:
        print("no reply of this run has a statistic that the attack reads")
        return 0
    for name, value in found.items():
        print(name, "-" if value is None else f"{value:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
