"""The scores of a model on a set of samples, and the communication cost of its training."""

from __future__ import annotations

import math
from collections.abc import Iterator

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
    model: nn.Module, data: Samples, task: Task, batcher: Batcher | None = None
) -> tuple[Scores, Tally]:
    """Evaluate the model.

    Args:
        model: the model; it is put into eval mode.
        data: at least one sample, ready for the model.
        task: has the criterion and the target.
        batcher: as in `outputs`.

    Returns:
        (`loss`, `n` and the scores of the target, as plain numbers; their tally, on the CPU).
    """
    model.eval()
    target = task.scoring
    loss = torch.zeros((), dtype=torch.float64, device=data.y.device)
    tally: Tally | None = None
    all_outputs = outputs(model, data.x, batcher)
    for output, y in zip(all_outputs, data.y.split(FORWARD_BATCH), strict=True):
        loss += task.criterion(output, y).double().sum()
        batch = target.tally(output, y)
        tally = batch if tally is None else target.join(tally, batch)
    n = len(data)
    tally = {name: t.cpu() for name, t in (tally or {}).items()}
    mean = float(loss) / n
    # A diverged model gets an infinite loss: unlike NaN, it can be compared.
    mean = math.inf if math.isnan(mean) else mean
    return {"loss": mean, "n": float(n), **target.scores(tally)}, tally


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
