"""Targets with any number of labels for each sample."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fedhet.core.counts import coarse
from fedhet.core.kinds import OfLabels
from fedhet.core.targets.target import Scores, Tally, Target, rows, whole


class Labels(OfLabels, Target):
    """y (n, L) is 1 for the labels that a sample has, and 0 for the others.

    The model predicts a label if the output is positive, that is, if its probability exceeds 1/2.
    The micro F1 counts all pairs of sample and label alike. The macro F1 is the mean over the
    labels that occur in targets or predictions. The subset accuracy is the share of samples with
    only correct labels.
    """

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the binary cross entropy of each sample, the mean over the labels."""
        output, y = rows(output, y)
        cells = functional.binary_cross_entropy_with_logits(
            output, y.to(output.dtype), reduction="none"
        )
        return cells.mean(1)

    def tally(self, output: Tensor, y: Tensor) -> Tally:
        output, y = rows(output, y)
        has = y > 0.5
        guess = output > 0
        return {
            "samples": whole(len(y), y),
            "exact": (has == guess).all(1).sum(),
            "hits": (has & guess).sum(0),
            "targets": has.sum(0),
            "guesses": guess.sum(0),
        }

    def scores(self, tally: Tally) -> Scores:
        scores = {}
        hits = tally["hits"].double()
        either = (tally["targets"] + tally["guesses"]).double()
        present = either > 0
        if present.any():  # else F1 is undefined: there are neither targets nor predictions
            scores = {
                "f1_micro": float(2 * hits.sum() / either.sum()),
                "f1_macro": float((2 * hits[present] / either[present]).mean()),
            }
        return scores | {"subset_accuracy": int(tally["exact"]) / int(tally["samples"])}

    def releasable(self, tally: Tally, y: Tensor, least: int) -> tuple[Scores, Tally]:
        """Return rounded counts and their scores; rounding keeps hits <= targets and guesses."""
        sent = {
            name: value if name == "samples" else coarse(value, len(y), least)
            for name, value in tally.items()
        }
        return self.scores(sent), sent

    def check(self, tally: object) -> Tally:
        checked = super().check(tally)
        if (checked["hits"] > torch.minimum(checked["targets"], checked["guesses"])).any():
            raise ValueError("a tally has more hits than targets or guesses of a label")
        return checked
