"""Quality measures of a model on a set of samples."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedhet.task import Samples, Task

CHUNK = 1024  # samples per forward pass outside training


def chunks(x: Tensor, size: int = CHUNK) -> list[Tensor]:
    """Split x (n, ...) into pieces of at most `size` samples."""
    return list(x.split(size))


def macro_f1(confusion: Tensor) -> float:
    """Return the mean F1 score over the classes that occur in targets or predictions.

    Args:
        confusion: (classes, classes) the counts of [target, prediction].
    """
    hits = confusion.diag().double()
    either = (confusion.sum(0) + confusion.sum(1)).double()
    present = either > 0
    return float((2 * hits[present] / either[present]).mean())


@torch.no_grad()
def score(model: nn.Module, data: Samples, task: Task) -> dict[str, float]:
    """Return `loss` and `n`, and for classes also `accuracy` and the macro `f1`.

    Args:
        model: the model, which is set to eval mode.
        data: the samples, prepared as the model's inputs.
        task: gives the criterion and the number of classes.
    """
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=data.y.device)
    confusion = torch.zeros(task.classes**2, dtype=torch.int64, device=data.y.device)
    for x, y in zip(chunks(data.x), chunks(data.y), strict=True):
        output = model(x)
        total += task.criterion(output, y).double().sum()
        if task.classes:
            cells = y * task.classes + output.argmax(1)
            confusion += torch.bincount(cells, minlength=task.classes**2)
    scores = {"loss": float(total) / len(data), "n": float(len(data))}
    if task.classes:
        square = confusion.reshape(task.classes, task.classes)
        scores["accuracy"] = float(square.diag().sum()) / len(data)
        scores["f1"] = macro_f1(square)
    return scores
