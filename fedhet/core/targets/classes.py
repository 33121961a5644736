"""Targets with one class for each sample, with few or many scores, and the next character."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor
from torch.nn import functional

from fedhet.core.counts import coarse
from fedhet.core.kinds import OfCharacters, OfClasses
from fedhet.core.targets.target import Scores, Tally, Target, whole

BINS = (
    15  # bins of the confidence, as in Guo et al. 2017, "On calibration of modern neural networks"
)
# Thresholds for the difference of two classes' outputs. They are densest near 0, where the outputs
# of a model with little training are.
_HALF = [i / 100 for i in range(100)] + [i / 20 for i in range(20, 80)]
_HALF += [i / 4 for i in range(16, 49)]
LIMITS = (*(-limit for limit in reversed(_HALF)), *_HALF[1:])


def cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    """Return the loss (B,) of each sample, given the outputs (B, classes) and targets (B,)."""
    if is_batchedtensor(output):  # under vmap the call below takes a third longer; bits are equal
        return -output.log_softmax(1).gather(1, y.unsqueeze(1)).squeeze(1)
    return functional.cross_entropy(output, y, reduction="none")


def confusions(output: Tensor, y: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the confusion matrices (K, classes, classes) of K sets of samples.

    Args:
        output: (n, classes), the outputs for all sets, one set after the other.
        y: (n,), their targets.
        sizes: the number of samples in each set.
    """
    classes = output.shape[1]
    sets = torch.arange(len(sizes), device=y.device)
    rows = sets.repeat_interleave(torch.tensor(sizes, device=y.device), output_size=len(y))
    cells = (rows * classes + y) * classes + output.argmax(1)
    counts = torch.bincount(cells, minlength=len(sizes) * classes**2)
    return counts.reshape(len(sizes), classes, classes)


def macro_f1(confusion: Tensor) -> list[float]:
    """Return the mean F1 of each of K sets, over the classes that occur in targets or predictions.

    Args:
        confusion: (K, classes, classes), the counts of [target, prediction].
    """
    hits = confusion.diagonal(dim1=1, dim2=2).double()
    either = confusion.sum(1) + confusion.sum(2)
    return [
        float(f1[occur].mean()) for f1, occur in zip(2 * hits / either, either > 0, strict=True)
    ]


class Classes(OfClasses, Target):
    """y (n,) is one of the classes 0 .. outputs - 1.

    Its scores are the accuracy and the macro F1.
    """

    tallied: ClassVar[bool] = False

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(output, y)

    def tally(self, output: Tensor, y: Tensor) -> Tally:
        return {"confusion": confusions(output, y, [len(y)])[0]}

    def scores(self, tally: Tally) -> Scores:
        return Classes.scored(self, [tally])[0]

    def tallies(self, output: Tensor, y: Tensor, sizes: Sequence[int]) -> list[Tally]:
        return [{"confusion": one} for one in confusions(output, y, sizes)]

    def scored(self, tallies: Sequence[Tally]) -> list[Scores]:
        confusion = torch.stack([tally["confusion"] for tally in tallies])
        right = confusion.diagonal(dim1=1, dim2=2).sum(1).tolist()
        every = zip(right, confusion.sum((1, 2)).tolist(), macro_f1(confusion), strict=True)
        return [{"accuracy": hits / n, "f1": f1} for hits, n, f1 in every]

    def releasable(self, tally: Tally, y: Tensor, least: int) -> tuple[Scores, Tally]:
        """Return the accuracy from a rounded number of correct predictions.

        Loss and F1 are not sent: a model that predicts the same for all samples would turn them
        into exact counts of the classes.
        """
        right = coarse(tally["confusion"].diag().sum(), len(y), least)
        return {"accuracy": int(right) / len(y)}, {}


class DetailedClasses(Classes):
    """Like Classes, with a tally that also gives calibration, recall and AUC.

    With two classes, class 1 is positive. Confidences and the AUC refer to softmax(output). A tally
    has only counts and sums, so joined tallies give the scores of all samples together:

    - `confusion` (C, C): the samples by [target, prediction];
    - `bins`, `hits`, `confidence` (BINS,): for each bin of the confidence, the number of samples,
      the number of correct predictions, and the sum of the confidences;
    - `above` (2, limits + 1), for two classes only: for each class the number of its samples, then
      the number of its samples with output[1] - output[0] >= limit, for each limit. These are
      points of the ROC curve, and the AUC is the area under the line through them.
    """

    tallied: ClassVar[bool] = True
    tallies, scored = Target.tallies, Target.scored

    def tally(self, output: Tensor, y: Tensor) -> Tally:
        output = output.double()
        # A diverged model (NaN) counts as sure: confidence 1.
        confidence, guess = output.softmax(1).nan_to_num(1.0).max(1)
        edges = torch.arange(1, BINS, device=y.device, dtype=torch.float64) / BINS
        where = torch.bucketize(confidence, edges)
        none = torch.zeros(BINS, dtype=torch.int64, device=y.device)
        tally = super().tally(output, y) | {
            "samples": whole(len(y), y),
            "bins": none.index_add(0, where, torch.ones_like(y)),
            "hits": none.index_add(0, where, (guess == y).long()),
            "confidence": none.double().index_add(0, where, confidence),
        }
        if self.outputs == 2:
            limits = torch.tensor(LIMITS, device=y.device, dtype=torch.float64)
            margin = (output[:, 1] - output[:, 0]).nan_to_num(0.0)
            passed = torch.bucketize(margin, limits, right=True)
            counts = torch.bincount(y * (len(limits) + 1) + passed, minlength=2 * (len(limits) + 1))
            tally["above"] = counts.view(2, -1).flip(1).cumsum(1).flip(1)
        return tally

    def scores(self, tally: Tally) -> Scores:
        return super().scores(tally) | self.further(tally)

    def further(self, tally: Tally) -> Scores:
        """Return the scores that Classes lacks, except scores that these samples do not define."""
        scores = {}
        of_class = tally["confusion"].sum(1)
        recall = tally["confusion"].diag().double() / of_class
        if self.outputs == 2:
            names = ("specificity", "sensitivity")
            scores = {name: float(recall[i]) for i, name in enumerate(names) if of_class[i]}
            negative, positive = torch.nn.functional.pad(tally["above"].double(), (0, 1))
            if positive[0] and negative[0]:
                area = (-negative.diff() * (positive[1:] + positive[:-1])).sum() / 2
                scores["auc"] = float(area / (positive[0] * negative[0]))
        elif of_class.any():
            scores["recall_macro"] = float(recall[of_class > 0].mean())
        if counted := int(tally["bins"].sum()):
            gaps = (tally["hits"] - tally["confidence"]).abs()
            scores["ece"] = min(1.0, float(gaps.sum()) / counted)  # rounding can exceed 1
        return scores

    def details(self, tally: Tally) -> dict[str, Any]:
        if not tally:
            return {}
        matrix = {"samples": int(tally["samples"]), "confusion": tally["confusion"].tolist()}
        return self.further(tally) | matrix

    def releasable(self, tally: Tally, y: Tensor, least: int) -> tuple[Scores, Tally]:
        """Return the accuracy as Classes does, and rounded counts with their scores.

        The sum of a bin's confidences would reveal single samples. Each confidence is therefore
        replaced by the middle of its bin, which changes the calibration error by a thirtieth at
        most.
        """
        sent = {
            name: value if name == "samples" else coarse(value, len(y), least)
            for name, value in tally.items()
            if name != "confidence"
        }
        middle = (torch.arange(BINS, dtype=torch.float64) + 0.5) / BINS
        sent["confidence"] = sent["bins"] * middle
        return super().releasable(tally, y, least)[0] | self.further(sent), sent

    @cached_property
    def layout(self) -> Tally:
        return self.tally(torch.zeros(1, self.outputs), torch.zeros(1, dtype=torch.int64))

    def check(self, tally: object) -> Tally:
        checked = super().check(tally)
        samples, bins, sums = int(checked["samples"]), checked["bins"], checked["confidence"]
        # `coarse` raises only counts above half of the samples: at most one, by less than half.
        # In float64, because a sum of int64 could wrap around.
        if max(checked[name].double().sum() for name in ("confusion", "bins")) > 1.5 * samples:
            raise ValueError(f"a tally of {samples} samples counts more samples than that")
        if (checked["hits"] > bins).any() or (
            "above" in checked and (checked["above"].diff() > 0).any()
        ):
            raise ValueError("a tally has more hits than samples in a bin, or increasing `above`")
        low, high = (torch.arange(start, BINS + start).double() / BINS * bins for start in (0, 1))
        rounding = 1e-9 * samples
        # A comparison with > instead would accept NaN.
        if not ((low - rounding <= sums) & (sums <= high + rounding)).all():
            raise ValueError("a tally has sums of confidences that do not fit their bins")
        return checked


class NextCharacter(OfCharacters, Classes):
    """x is a text, and y (n,) is the character that follows it; the classes are the alphabet."""
