"""How good a model is on a set of samples, and what its training has cost in communication."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedhet.task import Samples, Task

SCORE = "accuracy"  # the name of the score that runs are compared by
FORWARD_BATCH = 1024  # samples per forward pass outside training


def chunks(x: Tensor, size: int = FORWARD_BATCH) -> list[Tensor]:
    """Split a tensor along its first dimension."""
    return list(x.split(size))


def score_key(name: str) -> str:
    """The key of that score in a line of rounds.jsonl: `score_key("global")` is "acc_global"."""
    return f"acc_{name}"


def macro_f1(confusion: Tensor) -> float:
    """Return the mean F1 over the classes that occur in targets or predictions.

    Args:
        confusion: (classes, classes), the counts of [target, prediction].
    """
    hits = confusion.diag().double()
    either = (confusion.sum(0) + confusion.sum(1)).double()
    present = either > 0
    return float((2 * hits[present] / either[present]).mean())


@torch.no_grad()
def score(model: nn.Module, data: Samples, task: Task) -> dict[str, float]:
    """Evaluate the model.

    Args:
        model: it is put into eval mode.
        data: samples that are prepared for the model.
        task: its criterion and its number of classes.

    Returns:
        `loss` and `n`; for classes also `accuracy` and `f1` (macro). All are plain numbers.
    """
    model.eval()
    loss = torch.zeros((), dtype=torch.float64, device=data.y.device)
    confusion = torch.zeros(task.classes**2, dtype=torch.int64, device=data.y.device)
    for x, y in zip(chunks(data.x), chunks(data.y), strict=True):
        output = model(x)
        loss += task.criterion(output, y).double().sum()
        if task.classes:
            cells = y * task.classes + output.argmax(1)
            confusion += torch.bincount(cells, minlength=task.classes**2)
    n = len(data)
    scores = {"loss": float(loss) / n, "n": float(n)}
    if task.classes:
        square = confusion.reshape(task.classes, task.classes)
        scores |= {"accuracy": float(square.diag().sum()) / n, "f1": macro_f1(square)}
    return scores


def comm_cost(clf: int, clf_rounds: int, made: int = 0, made_rounds: int = 0) -> int:
    """Return 2 (eps_1 E_1 + eps_2 E_2), the numbers that one client sends and receives.

    FedDisk (Nguyen, Wu and Chang), equation 19; equation 18 without a MADE.

    Args:
        clf: eps_2, the number of the model's weights, which travel one way in a round.
        clf_rounds: E_2, the rounds of its training.
        made: eps_1, the number of the MADE's weights.
        made_rounds: E_1, the rounds of its training.
    """
    if min(clf, clf_rounds, made, made_rounds) < 0:
        raise ValueError(
            f"sizes {made}, {clf} and rounds {made_rounds}, {clf_rounds}; all must be >= 0"
        )
    return 2 * (made * made_rounds + clf * clf_rounds)


def effective_rounds(accuracy: Tensor, target: float | None = None) -> int | None:
    """Return the first round, counted from 1, whose accuracy reaches the target.

    FedDisk's effective communication rounds are E_1 plus this number, where the target is the best
    accuracy that any competitor ever reaches.

    Args:
        accuracy: (T,), the accuracy after each round.
        target: the best of `accuracy` itself if None.

    Returns:
        The round, or None if the target is never reached.
    """
    if accuracy.ndim != 1 or not len(accuracy) or not torch.isfinite(accuracy).all():
        raise ValueError(
            f"accuracies of shape {tuple(accuracy.shape)}; expected finite ones (T,) with T >= 1"
        )
    reached = (accuracy >= (accuracy.max() if target is None else target)).nonzero().flatten()
    return int(reached[0]) + 1 if len(reached) else None
