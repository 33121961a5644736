"""How good a model is on a set of samples, and what its training has cost in communication."""

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
    """What a model makes of x (n, ...), `FORWARD_BATCH` inputs at a time.

    Args:
        model: the model, in eval mode.
        x: its inputs.
        batcher: carries out the passes together with those of other clients; or None.
        part: the method of the model, such as "features".
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
        model: it is put into eval mode.
        data: samples that are prepared for the model, at least one.
        task: its criterion and its target.
        batcher: as in `outputs`.

    Returns:
        `loss`, `n` and the scores of the target, all of them plain numbers; and the tally of which
        they are the scores, on the CPU.
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
    # The loss of a model that has diverged; without NaN losses can be compared.
    mean = math.inf if math.isnan(mean) else mean
    return {"loss": mean, "n": float(n), **target.scores(tally)}, tally


def comm_cost(clf: int, clf_rounds: int, made: int = 0, made_rounds: int = 0) -> int:
    """Return 2 (eps_1 E_1 + eps_2 E_2), the numbers that one client sends and receives.

    FedDisk (Nguyen, Wu and Chang), equation 19; equation 18 without a MADE.

    Args:
        clf: eps_2, the number of the model's weights, which travel one way in a round.
        clf_rounds: E_2, the rounds of its training.
        made: eps_1, the number of the MADE's weights.
        made_rounds: E_1, the rounds of its training.
    """
    return 2 * (made * made_rounds + clf * clf_rounds)


def effective_rounds(accuracy: Tensor, threshold: float | None = None) -> int | None:
    """Return the first round, counted from 1, whose accuracy reaches the threshold.

    FedDisk's effective communication rounds are E_1 plus this number, where the threshold is the
    best accuracy that any competitor ever reaches.

    Args:
        accuracy: (T,), the accuracy after each round, finite, T >= 1.
        threshold: the best of `accuracy` itself if None.

    Returns:
        The round, or None if it is never reached.
    """
    reached = (accuracy >= (accuracy.max() if threshold is None else threshold)).nonzero().flatten()
    return int(reached[0]) + 1 if len(reached) else None
