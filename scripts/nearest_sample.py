"""An attack on what clients send: which training sample is nearest to a statistic?

    python scripts/nearest_sample.py method=fedgmm experiment=digits [privacy.min_count=0]

Makes a run in this process, reads the replies of its clients as the server does, and compares each
statistic with the samples behind it: the means of FedGMM's components with images, FedPCL's
prototypes and FedNorm's mean latents with what the client's own network, which the attacker is
assumed to know, makes of images. Of a MADE of FedDisk, which is no statistic, the attacker takes
the image that it expects (each pixel given those before it), and measures by how much training has
raised the likelihood of a sample. Of FedGen's label counts, which are of no image, a copy is a
count of one sample, and the AUC is that of guessing which classes a client has. Prints, of all
replies together:

    sent    statistics that were sent; if there are none, a line that says so is all
    copies  the share of them that are a training sample, to 1e-3 of its norm
    auc     how well the distance to the nearest statistic tells training samples from others:
            the probability that a training sample of a client and class is nearer than one of the
            same class in the global test set (FedNorm: than one in the client's own held-out data;
            FedDisk: that its likelihood has been raised by more; FedGen: that a class of which the
            client has samples has a larger count than one of which it has none). .5 is chance.
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
    """What a reply tells, and of what.

    Attributes:
        statistics: (k, d).
        members: (n, d) the samples behind them.
        others: (m, d) others of the same kind.
        scores: (n,) and (m,), where the attacker tells members from others by something else than
            the distance to the nearest statistic; members should have the smaller ones.
    """

    statistics: Tensor
    members: Tensor
    others: Tensor
    scores: tuple[Tensor, Tensor] | None = None


def measure(overrides: list[str]) -> dict[str, float | None]:
    """Make the run, and return `sent`, `copies` and `auc`; None where nothing was sent.

    Raises:
        RuntimeError: a client failed.
    """
    copies: list[Tensor] = []
    aucs: list[Tensor] = []  # for each target, repeated for each of its members
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
    """Make the run, and yield what each reply tells."""
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
    """What an update tells; the client still holds the network with which it was made."""
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
        told = reply.counts(COUNTS, reply.num_examples, workspace.task.classes)
        yield from of_counts(told, own.train.y)
    if client.msg.slot == SLOT and reply.weights:
        images = (flat(workspace.floating(part)) for part in (own.train, test))
        yield from of_density(client, reply, *images)


def of_counts(told: Tensor, label: Tensor) -> Iterator[Target]:
    """What counts of labels tell: where there is one sample, and which classes there are."""
    counts = told.double()[:, None]
    yield Target(counts[told > 0], counts.new_ones(1, 1), counts[:0])
    has = label.bincount(minlength=len(told)) > 0
    yield Target(counts[:0], counts[has], counts[~has], (-counts[has, 0], -counts[~has, 0]))


@torch.no_grad()
def of_density(
    client: FedClient, reply: Upload, members: Samples, others: Samples
) -> Iterator[Target]:
    """What a MADE tells to someone who knows the one from which its training started."""
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
    """A target for each class of which there are statistics."""
    for c in label.unique():
        own, rest = members.x[members.y == c], others.x[others.y == c]
        yield Target(statistics[label == c], own, rest)


def flat(samples: Samples) -> Samples:
    """The samples as vectors."""
    return Samples(samples.x.flatten(1), samples.y)


@torch.no_grad()
def latents(client: FedClient, samples: Samples, *, unit: bool = False) -> Samples:
    """What the last layer of the client's network reads of the samples, of length 1 if `unit`."""
    model = client.workspace.model.eval()
    x = torch.cat([model.features(x).flatten(1) for x in samples.x.split(FORWARD_BATCH)])  # type: ignore[operator]
    return Samples(normalize(x) if unit else x, samples.y)


def main(overrides: list[str]) -> int:
    """Print what the attack finds; return the exit code."""
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
