"""The rule by which a figure counts as reproduced.

Level. A margin is fixed beforehand: two percentage points for a share, such as an accuracy, and 5 %
of the paper's figure for anything else. Our mean agrees with the paper's figure if the whole of its
90 % interval (Student's t, so that these are two one-sided tests at 5 %) lies within the margin
around it, over at least five seeds. It differs if the whole of the interval lies outside. Else
neither is shown. For a count that no seed changes, such as the size of a model, the margin is what
the paper's rounding hides, which stands in the experiment's file as its spread, and one run is
enough.

Direction. The difference between a method and its host, or between two settings of which the paper
says that one is better, is taken seed by seed. All such comparisons of one reproduction at one
scale are a family, and a difference is shown as fedhet.study.report.statistics says: by Wilcoxon's
signed-rank test with Holm's correction. It is then the paper's direction or the opposite one. A
comparison is not tested if it has fewer seeds than its family needs, or if the tuned values of the
two differ and fewer than five seeds chose them.

Verdict:
  reproduced        the level agrees
  direction only    the level does not, or was not compared, and the direction is the paper's
  not reproduced    the level differs, or the direction is the opposite one; or, where levels are
                    compared, the direction of a claim was tested and is not shown
  not shown         none of these, although the direction was tested; or, without a direction,
                    although the level has five seeds
  not tested        none of these, because the direction was not tested; or, without a direction,
                    because the level has fewer than five seeds
  not comparable    levels are not compared, because the data or the model are others at this scale
                    or because times are another machine's, and there is no direction; or no run has
                    such a value
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
FEWEST = 5  # seeds that a level takes to agree
SHARE_MARGIN, MARGIN = 0.02, 0.05  # of a share; of the paper's figure, for all else
CONFIDENCE = 0.9


@dataclass(frozen=True)
class Sample:
    """What was measured, over the seeds.

    Attributes:
        count: how many runs.
        mean: NaN if there are none.
        spread: the standard deviation; None for less than two runs.
    """

    count: int
    mean: float
    spread: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Sample:
        """The sample of these values, one for each run."""
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
        ours: what was measured.
        value: the paper's figure.
        rounding: of a count that no seed changes, by how much the printed one may be off; None for
            all else.
        share: whether it is a share, as an accuracy is.
    """
    certain = rounding is not None and bool(ours.count) and not ours.spread
    if ours.error is None and not certain:
        return None
    reach = (ours.error or 0.0) * float(stats.t.ppf((1 + CONFIDENCE) / 2, max(1, ours.count - 1)))
    # The figures are printed decimals: the last bit of a difference must not decide.
    margin = (SHARE_MARGIN if share else MARGIN * abs(value)) if rounding is None else rounding
    margin += 1e-9 * abs(value)
    distance = abs(ours.mean - value)
    if distance - reach > margin:
        return False
    return True if distance + reach <= margin and (certain or ours.count >= FEWEST) else None


def directions(family: Sequence[tuple[Sequence[float], float]]) -> list[str]:
    """What is shown of comparisons that are one family of tests.

    Args:
        family: of each comparison the differences, one for each seed, and the sign that the paper
            has: a positive or negative number; 0 if it has no difference, which nothing shows.
    """
    samples = [np.array(differences) for differences, _ in family]
    # The test takes what is smaller than 1e-9 for rounding, and the unit of a measure may be.
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
    """The verdict on a figure, or on a claim.

    Args:
        ours: what was measured.
        agrees: what `level` says. A claim has no level: False if its direction was tested and is
            not shown, else None.
        shown: what `directions` says; None where there is nothing to compare with.
        levels: whether levels may be compared.
        run: whether there are runs, if perhaps without such a value.
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
