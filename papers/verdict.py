"""The rule by which a figure counts as reproduced.

Level. The margin is fixed beforehand: two percentage points for a share, such as an accuracy, and
5 % of the paper's figure for any other measure. Our mean agrees with the paper's figure if, over at
least five seeds, its whole 90 % interval lies within the margin around the figure (Student's t;
these are two one-sided tests at 5 %). It differs if the whole interval lies outside. Otherwise
neither is shown. Counts that do not depend on the seed, such as the size of a model, need one run
only; their margin is the paper's rounding error, which is their spread in the experiment's file.

Direction. The paper orders a method and its base method, or two settings. We compute the difference
of the two seed by seed. All comparisons of one reproduction at one scale are a family. A difference
is shown by Wilcoxon's signed-rank test with Holm's correction (fedhet.study.report.statistics). It
then has the paper's direction or the opposite one. A comparison is not tested if it has fewer seeds
than its family needs, or if the two have different tuned values that fewer than five seeds chose.

Verdict:
  reproduced        the level agrees
  direction only    the level does not agree or was not compared, but the direction is the paper's
  not reproduced    the level differs, or the direction is the opposite one; or levels are compared,
                    and the direction of a claim was tested and is not shown
  not shown         none of these, but the direction was tested; without a direction: the level has
                    at least five seeds
  not tested        none of these, because the direction was not tested; without a direction: the
                    level has fewer than five seeds
  not comparable    there is no direction, and levels are not compared (other data or models at this
                    scale, or times on another machine); or no run has such a value
  not run           runs are missing
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

import numpy as np
import pandas as pd
from scipy import stats

from fedhet.study.report.statistics import NOT_SHOWN, NOT_TESTED, SHOWN, decide, wilcoxon

REPRODUCED = "reproduced"
DIRECTION_ONLY = "direction only"
NOT_REPRODUCED = "not reproduced"
NOT_COMPARABLE = "not comparable"
NOT_RUN = "not run"
VERDICTS = (
    *(REPRODUCED, DIRECTION_ONLY, NOT_REPRODUCED),
    *(NOT_SHOWN, NOT_TESTED, NOT_COMPARABLE, NOT_RUN),
)

SAME, OPPOSITE = "as in the paper", "opposite"
FEWEST = 5  # a level can agree from this number of seeds on
SHARE_MARGIN, MARGIN = 0.02, 0.05  # for shares; relative to the paper's figure, for other measures
CONFIDENCE = 0.9


@dataclass(frozen=True)
class Sample:
    """Measured values over the seeds.

    Attributes:
        count: number of runs.
        mean: the mean; NaN without runs.
        spread: the standard deviation; None for less than two runs.
    """

    count: int
    mean: float
    spread: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Sample:
        """Make the sample of these values, one for each run."""
        return cls(
            len(values),
            mean(values) if values else math.nan,
            stdev(values) if len(values) > 1 else None,
        )

    @property
    def error(self) -> float | None:
        """The standard error of the mean; None for less than two runs."""
        return None if self.spread is None else self.spread / math.sqrt(self.count)


def level(
    ours: Sample, value: float, rounding: float | None = None, *, share: bool = False
) -> bool | None:
    """Whether our mean agrees with the paper's figure (True), or differs; None: neither is shown.

    Args:
        ours: our values.
        value: the paper's figure.
        rounding: for counts that do not depend on the seed: the rounding error of the printed
            figure. None for other measures.
        share: whether the measure is a share, such as an accuracy.
    """
    certain = rounding is not None and bool(ours.count) and not ours.spread
    if ours.error is None and not certain:
        return None
    reach = (ours.error or 0.0) * float(stats.t.ppf((1 + CONFIDENCE) / 2, max(1, ours.count - 1)))
    # The figures are printed decimals, so the last bit of a difference must not decide.
    margin = (SHARE_MARGIN if share else MARGIN * abs(value)) if rounding is None else rounding
    margin += 1e-9 * abs(value)
    distance = abs(ours.mean - value)
    if distance - reach > margin:
        return False
    return True if distance + reach <= margin and (certain or ours.count >= FEWEST) else None


def directions(family: Sequence[tuple[Sequence[float], float]]) -> list[str]:
    """Test comparisons that are one family, and return the result for each.

    Args:
        family: for each comparison, the differences by seed, and a number with the sign of the
            paper's difference. If the number is 0, the result is never SAME or OPPOSITE.
    """
    samples = [np.array(differences) for differences, _ in family]
    # The test takes differences below 1e-9 for rounding errors, so they are scaled first.
    samples = [sample / (abs(sample).max(initial=0) or 1) for sample in samples]
    found = pd.DataFrame(
        {"pairs": [*map(len, samples)], "p": [*map(wilcoxon, samples)]}, dtype=float
    )
    shown = [*decide(found)["verdict"]]
    for i, (sample, (_, sign)) in enumerate(zip(samples, family, strict=True)):
        if shown[i] == SHOWN:
            agrees = sample.mean() * sign > 0
            shown[i] = SAME if agrees else OPPOSITE if sign else NOT_SHOWN
    return shown


def verdict(
    ours: Sample, agrees: bool | None, shown: str | None, *, levels: bool, run: bool = True
) -> str:
    """Return the verdict on a figure or a claim.

    Args:
        ours: our values.
        agrees: the result of `level`. For a claim: False if its direction was tested and is not
            shown, else None.
        shown: the result of `directions`; None if there is nothing to compare with.
        levels: whether levels may be compared.
        run: whether there are runs; they may lack a value of the measure.
    """
    if not ours.count:
        return NOT_COMPARABLE if run else NOT_RUN
    if levels and agrees:
        return REPRODUCED
    if shown == SAME:
        return DIRECTION_ONLY
    if shown == OPPOSITE or (levels and agrees is False):
        return NOT_REPRODUCED
    if shown is None and not levels:
        return NOT_COMPARABLE
    return shown or (NOT_SHOWN if ours.count >= FEWEST else NOT_TESTED)
