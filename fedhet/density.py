"""Training of the small networks that FedDisk compares densities with: MADE, and a binary
classifier. Nothing here knows of rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import isfinite

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedhet import optimizers, trees
from fedhet.maths.feddisk import Masks, nll
from fedhet.messages import LocalSettings
from fedhet.phases import EarlyStopping
from fedhet.trees import Tree


def descend(
    what: str,
    losses: Callable[[Tensor], Tensor],
    params: Sequence[Tensor],
    n: int,
    settings: LocalSettings,
    draws: torch.Generator,
) -> Iterator[float]:
    """`settings.epochs` epochs over n samples, each shuffled anew; `losses(indices)` is (B,).
    Yields each epoch's mean loss.

    Raises:
        ValueError: the loss is NaN or infinite.
    """
    optimizer = optimizers.make(settings, params)  # type: ignore[arg-type]
    for _ in range(settings.epochs):
        total = 0.0
        for at in torch.randperm(n, generator=draws).split(settings.batch_size):
            batch = losses(at)
            grads = list(torch.autograd.grad(batch.mean(), params))
            with torch.no_grad():
                optimizer.step(grads)
            total += float(batch.detach().sum())
        if not isfinite(total):
            raise ValueError(f"the loss of the {what} is {total}; a smaller learning rate may help")
        yield total / n


def made_epochs(
    what: str, made: Tree, mask: Masks, x: Tensor, settings: LocalSettings, draws: torch.Generator
) -> Iterator[float]:
    """Epochs of maximum likelihood on x (n, D); `made` is changed in place."""
    return descend(
        what, lambda at: nll(made, mask, x[at]), list(made.values()), len(x), settings, draws
    )


@torch.no_grad()
def mean_nll(made: Tree, mask: Masks, x: Tensor) -> float:
    return float(nll(made, mask, x).double().mean())


def fit_made(
    made: Tree,
    mask: Masks,
    x: Tensor,
    held: Tensor,
    settings: LocalSettings,
    patience: int,
    draws: torch.Generator,
) -> Tree:
    """A MADE fitted to x (n, D): the epoch with the lowest loss on `held`, where `patience` more
    did not find a lower one."""
    stop, best = EarlyStopping(patience), made
    for _ in made_epochs("local MADE", made, mask, x, settings, draws):
        done = stop(mean_nll(made, mask, held))
        if not stop.stale:
            best = trees.map(lambda t: t.detach().clone(), made)
        if done:
            break
    return best


def classify(
    zeros: Tensor,
    ones: Tensor,
    at: Tensor,
    hidden: int,
    settings: LocalSettings,
    stop: EarlyStopping,
    draws: torch.Generator,
) -> Tensor:
    """(n,): P(1 | z) at the rows of `at`, by a ReLU network trained to tell `zeros` from `ones`.
    Initialised from torch's global stream."""
    x = torch.cat([zeros, ones])
    y = torch.cat([x.new_zeros(len(zeros)), x.new_ones(len(ones))]).long()
    net = nn.Sequential(nn.Linear(x.shape[1], hidden), nn.ReLU(), nn.Linear(hidden, 2)).to(x.device)
    epochs = descend(
        "classifier",
        lambda i: functional.cross_entropy(net(x[i]), y[i], reduction="none"),
        list(net.parameters()),
        len(y),
        settings,
        draws,
    )
    for loss in epochs:
        if stop(loss):
            break
    with torch.no_grad():
        found: Tensor = net(at).softmax(1)[:, 1]
    return found
