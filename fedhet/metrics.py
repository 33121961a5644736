"""How good a model is on a set of samples."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedhet.task import Samples, Task

CHUNK = 1024  # samples per forward pass outside training


def chunks(x: Tensor, size: int = CHUNK) -> list[Tensor]:
    return list(x.split(size))


def macro_f1(confusion: Tensor) -> float:
    """The mean F1 over the classes that occur in targets or predictions; `confusion` (classes,
    classes) counts [target, prediction]."""
    hits = confusion.diag().double()
    either = (confusion.sum(0) + confusion.sum(1)).double()
    present = either > 0
    return float((2 * hits[present] / either[present]).mean())


@torch.no_grad()
def score(model: nn.Module, data: Samples, task: Task) -> dict[str, float]:
    """`loss` and `n`; for classes also `accuracy` and `f1` (macro), all as plain numbers. `data` is
    ready for the model."""
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=data.y.device)
    confusion = torch.zeros(task.classes**2, dtype=torch.int64, device=data.y.device)
    for x, y in zip(chunks(data.x), chunks(data.y), strict=True):
        output = model(x)
        total += task.criterion(output, y).double().sum()
        if task.classes:
            confusion += torch.bincount(
                y * task.classes + output.argmax(1), minlength=task.classes**2
            )
    found = {"loss": float(total) / len(data), "n": float(len(data))}
    if task.classes:
        square = confusion.reshape(task.classes, task.classes)
        found |= {"accuracy": float(square.diag().sum()) / len(data), "f1": macro_f1(square)}
    return found
