"""The scores of a model on a set of samples, and the communication cost of its training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from fedhet.core.client.descent import Batcher
from fedhet.core.targets import Scores, Tally
from fedhet.core.task import Samples, Task

FORWARD_BATCH = 1024  # samples per forward pass outside training


def outputs(
    model: nn.Module, x: Tensor, batcher: Batcher | None, part: str = "forward"
) -> Iterator[Tensor]:
    """Yield the outputs of a model, for `FORWARD_BATCH` inputs at a time.

    Args:
        model: the model, in eval mode.
        x: (n, ...) its inputs.
        batcher: carries out the forward passes of several clients in one batch; or None.
        part: the method of the model to call, such as "features".
    """
    if batcher is None:
        yield from map(getattr(model, part), x.split(FORWARD_BATCH))
    else:
        yield from batcher.forward(model, x, part).split(FORWARD_BATCH)


@torch.no_grad()
def assess(
    model: nn.Module, parts: Sequence[Samples], task: Task, batcher: Batcher | None = None
) -> list[tuple[Scores, Tally]]:
    """Evaluate the model on sets of samples.

    Args:
        model: the model; it is put into eval mode.
        parts: the sets: each has at least one sample, ready for the model.
        task: has the criterion and the target.
        batcher: evaluates in one batch with other clients; or None.

    Returns:
        For each set (`loss`, `n` and the scores of the target, as plain numbers; their tally, on
        the CPU).
    """
    model.eval()
    if batcher is not None:
        return batcher.assess(model, parts, task)
    sizes = [*map(len, parts)]
    if 0 < sum(sizes) <= FORWARD_BATCH:  # count all sets at once
        output = torch.cat([*chain(*(outputs(model, data.x, None) for data in parts))])
        return scored(*tallied(output, torch.cat([p.y for p in parts]), sizes, task), sizes, task)
    found = []
    for data in parts:
        total = data.y.new_zeros(1, dtype=torch.float64)
        tallies = []
        batches = zip(outputs(model, data.x, None), data.y.split(FORWARD_BATCH), strict=True)
        for output, y in batches:
            losses, batch_tallies = tallied(output, y, [len(y)], task)
            total += losses
            tallies += batch_tallies
        found += scored(total, [task.scoring.joined(tallies)], [len(data)], task)
    return found


def tallied(
    output: Tensor, y: Tensor, sizes: Sequence[int], task: Task
) -> tuple[Tensor, list[Tally]]:
    """Return the sum of the losses (K,), float64, and the tally of each of K sets of samples.

    Args:
        output: (n, ...), the model's outputs for all sets, one set after the other.
        y: (n, ...), their targets.
        sizes: the number of samples in each set.
        task: has the criterion and the target.
    """
    losses = task.criterion(output, y).double().split(sizes)
    return torch.stack([own.sum() for own in losses]), task.scoring.tallies(output, y, sizes)


def scored(
    losses: Tensor, tallies: Sequence[Tally], sizes: Sequence[int], task: Task
) -> list[tuple[Scores, Tally]]:
    """Return what `assess` returns for K sets, from the sums of their losses and their tallies."""
    # One transfer from an accelerator for each name.
    stacked = {name: torch.stack([own[name] for own in tallies]).cpu() for name in tallies[0]}
    on_cpu = [{name: t[k] for name, t in stacked.items()} for k in range(len(sizes))]
    return [
        # A diverged model gets an infinite loss: unlike NaN, it can be compared.
        ({"loss": math.inf if math.isnan(loss) else loss / n, "n": float(n), **scores}, tally)
        for loss, n, scores, tally in zip(
            losses.tolist(), sizes, task.scoring.scored(on_cpu), on_cpu, strict=True
        )
    ]


def comm_cost(clf: int, clf_rounds: int, made: int = 0, made_rounds: int = 0) -> int:
    """Return 2 (eps_1 E_1 + eps_2 E_2), how many numbers one client sends and receives.

    FedDisk (Nguyen, Wu and Chang), equation 19; equation 18 without a MADE.

    Args:
        clf: eps_2, the number of the model's weights; each round sends them once in each direction.
        clf_rounds: E_2, the number of rounds that train the model.
        made: eps_1, the number of the MADE's weights.
        made_rounds: E_1, the number of rounds that train the MADE.
    """
    return 2 * (made * made_rounds + clf * clf_rounds)


def effective_rounds(accuracy: Tensor, threshold: float | None = None) -> int | None:
    """Return the first round, counted from 1, in which the accuracy reaches the threshold.

    FedDisk's effective communication rounds are E_1 plus this number; its threshold is the best
    accuracy that any competitor ever reaches.

    Args:
        accuracy: (T,), the accuracy after each round, finite, T >= 1.
        threshold: the accuracy to reach; None: the largest value of `accuracy`.

    Returns:
        The round, or None if the threshold is never reached.
    """
    reached = (accuracy >= (accuracy.max() if threshold is None else threshold)).nonzero().flatten()
    return int(reached[0]) + 1 if len(reached) else None
