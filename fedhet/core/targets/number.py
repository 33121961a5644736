"""Targets that are numbers: regression."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedhet.core.counts import counts_few
from fedhet.core.kinds import OfNumbers
from fedhet.core.targets.target import Scores, Tally, Target, constant, rows, whole


@dataclass(frozen=True)
class Number(OfNumbers, Target):
    """y (n, K) are K numbers.

    The model predicts (y - mean) / std, so the scale of y does not influence training. R2 is the
    mean over the numbers that vary in the samples. MAE and RMSE are means over the numbers, in the
    units of y.

    Attributes:
        mean, std: (K,) the mean and standard deviation of each number; empty: the model predicts y
            itself.
    """

    optional: ClassVar[frozenset[str]] = frozenset({"absolute"})

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the squared error of each prediction, the mean over the numbers."""
        output, y = rows(output, y)
        y = y.to(output.dtype)
        if self.std:
            mean, std = (constant(values, y.device, y.dtype) for values in (self.mean, self.std))
            y = (y - mean) / std
        return (output - y).square().mean(1)

    def tally(self, output: Tensor, y: Tensor) -> Tally:
        output, y = rows(output.double(), y.double())
        if self.std:
            mean, std = (constant(v, y.device, y.dtype) for v in (self.mean, self.std))
            output = output * std + mean
        # Relative to the first sample, so that a constant number has a variation of exactly 0.
        away = y - y[0]
        centre = away.mean(0)
        return {
            "samples": whole(len(y), y),
            "absolute": (output - y).abs().sum(0),
            "squared": (output - y).square().sum(0),
            "mean": y[0] + centre,
            "variation": (away - centre).square().sum(0),
        }

    def join(self, first: Tally, second: Tally) -> Tally:
        """Join the sums, and the mean and the variation around it (Chan et al. 1979)."""
        joined = super().join(first, second)
        step = second["mean"] - first["mean"]
        share = second["samples"].double() / joined["samples"]
        joined["mean"] = first["mean"] + step * share
        joined["variation"] += step.square() * first["samples"] * share
        return joined

    def scores(self, tally: Tally) -> Scores:
        n = int(tally["samples"])
        # A diverged model gets an infinite error: unlike NaN, it can be compared.
        squared = tally["squared"].nan_to_num(nan=math.inf, posinf=math.inf)
        varies = tally["variation"] > 0
        scores = {}
        if varies.any():
            scores["r2"] = float((1 - squared[varies] / tally["variation"][varies]).mean())
        if "absolute" in tally:
            absolute = tally["absolute"].nan_to_num(nan=math.inf, posinf=math.inf)
            scores["mae"] = float(absolute.mean()) / n
        return scores | {"rmse": float((squared / n).sqrt().mean())}

    def releasable(self, tally: Tally, y: Tensor, least: int) -> tuple[Scores, Tally]:
        """Return R2 and RMSE; or nothing, if mean and variation of y reveal a small count.

        Absolute errors are not sent: for constant predictions they would reveal the whole
        distribution of y. Squared errors reveal only its mean and variation, which are sent anyway.
        """
        if any(counts_few(y.reshape(len(y), -1).cpu().numpy(), least)):
            return {}, {}
        sent = {name: value for name, value in tally.items() if name not in self.optional}
        return self.scores(sent), sent

    def check(self, tally: object) -> Tally:
        checked = super().check(tally)
        given = torch.cat([checked["mean"], checked["variation"]])
        names = ("absolute", "squared", "variation")
        sums = torch.cat([checked[name] for name in names if name in checked])
        if not given.isfinite().all() or (sums < 0).any():
            raise ValueError("a tally has sums that are not finite and >= 0")
        return checked
