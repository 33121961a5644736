"""One class for each sample, and the next character of a text."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor
from torch.nn import functional

from fedhet.core.counts import coarse
from fedhet.core.targets.base import Scores, Tally, Target


def cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    """Return the loss of each sample: (B, classes), (B,) -> (B,)."""
    if is_batchedtensor(output):  # vmap takes a third longer for the other, of equal bits
        return -output.log_softmax(1).gather(1, y.unsqueeze(1)).squeeze(1)
    return functional.cross_entropy(output, y, reduction="none")


def macro_f1(confusion: Tensor) -> float:
    """Return the mean F1 over the classes that occur in targets or predictions.

    Args:
        confusion: (classes, classes), the counts of [target, prediction].
    """
    hits = confusion.diag().double()
    either = (confusion.sum(0) + confusion.sum(1)).double()
    present = either > 0
    return float((2 * hits[present] / either[present]).mean())


class Classes(Target):
    """y (n,) is one of the classes 0 .. outputs - 1.

    Its scores are the accuracy and the macro F1.
    """

    name: ClassVar[str] = "class"
    title: ClassVar[str] = "accuracy"
    keys: ClassVar[dict[str, str]] = {"accuracy": "acc"}
    pooled: ClassVar[bool] = False
    tallied: ClassVar[bool] = False

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(output, y)

    def tally(self, output: Tensor, y: Tensor) -> Tally:
        cells = y * self.outputs + output.argmax(1)
        counts = torch.bincount(cells, minlength=self.outputs**2)
        return {"confusion": counts.reshape(self.outputs, self.outputs)}

    def scores(self, tally: Tally) -> Scores:
        confusion = tally["confusion"]
        accuracy = float(confusion.diag().sum()) / int(confusion.sum())
        return {"accuracy": accuracy, "f1": macro_f1(confusion)}

    def releasable(self, tally: Tally, y: Tensor, least: int) -> tuple[Scores, Tally]:
        """The accuracy, of a coarse number of right predictions.

        The loss and F1 of a model that predicts the same for all samples have the exact counts of
        the classes in them.
        """
        right = coarse(tally["confusion"].diag().sum(), len(y), least)
        return {"accuracy": int(right) / len(y)}, {}


class NextCharacter(Classes):
    """x is a text, and y (n,) the character that follows it; the classes are the alphabet."""

    name: ClassVar[str] = "next_char"
