"""The rule by which a figure counts as reproduced.

It was changed on 2026-11-25: until then, a level agreed if it lay within two of our standard errors
of the paper's figure, or within the spread that the paper prints behind it, so that noise, ours or
the paper's, could make it agree. docs/reproduction.md shows the verdicts by both rules.

Level. A margin is fixed beforehand: two percentage points for a share, such as an accuracy, and 5 %
of the paper's figure for anything else. Our mean agrees with the paper's figure if the whole of its
90 % interval (Student's t, so that these are two one-sided tests at 5 %) lies within the margin
around it, over at least five seeds. It differs if the whole of the interval lies outside. Else the
seeds are too few to tell. For a count that no seed changes, such as the size of a model, the margin
is what the paper's rounding hides, which stands in the experiment's file as its spread, and one run
is enough.

Direction. The difference between a method and its host, or between two settings of which the paper
says that one is better, is taken seed by seed. It is the paper's direction if the mean difference
has the paper's sign and exceeds two of its standard errors; the opposite one if it exceeds them
with the other sign; else it is not shown. One seed shows no direction.

Verdict:
  reproduced        the level agrees
  direction only    the level does not, or was not compared, and the direction is the paper's
  not reproduced    the level differs, or the direction is the opposite one; or a claim has a
                    direction that at least five seeds do not show, where levels are compared
  too few seeds     levels are compared, and none of these can be said
  not comparable    levels are not compared, because the data or the model are others at this scale
                    or because times are another machine's, and no direction is shown; or no run has
                    such a value
  not run           runs are missing
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from scipy import stats

REPRODUCED = "reproduced"
DIRECTION_ONLY = "direction only"
NOT_REPRODUCED = "not reproduced"
TOO_FEW = "too few seeds"
NOT_COMPARABLE = "not comparable"
NOT_RUN = "not run"
VERDICTS = (REPRODUCED, DIRECTION_ONLY, NOT_REPRODUCED, TOO_FEW, NOT_COMPARABLE, NOT_RUN)

SAME, OPPOSITE, NOT_SHOWN = "as in the paper", "opposite", "not shown"
ERRORS = 2.0  # standard errors
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
    """Whether our mean agrees with the paper's figure (True), or differs; None: too few seeds.

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


def earlier_level(ours: Sample, value: float, spread: float | None) -> bool | None:
    """Whether a level agreed by the rule before 2026-11-25; None if that could not be judged."""
    widths = [width for width in (spread, ours.error and ERRORS * ours.error) if width is not None]
    if not ours.count or not widths:
        return None
    return abs(ours.mean - value) <= max(widths) * (1 + 1e-9) + 1e-12


def direction(differences: Sample, sign: float) -> str:
    """What the differences, one for each seed, show.

    Args:
        differences: those in which the paper has `sign`.
        sign: a positive or negative number; 0 if the paper has no difference, which nothing shows.
    """
    error = differences.error
    if error is None or not sign or abs(differences.mean) <= ERRORS * error:
        return NOT_SHOWN
    return SAME if (differences.mean > 0) == (sign > 0) else OPPOSITE


def verdict(
    ours: Sample,
    agrees: bool | None,
    shown: str | None,
    *,
    levels: bool,
    directions: bool,
    run: bool = True,
) -> str:
    """The verdict on a figure, or on a claim.

    Args:
        ours: what was measured.
        agrees: what `level` says. A claim has no level: False if there are at least five seeds,
            which should show its direction, else None.
        shown: what `direction` says; None where there is nothing to compare with.
        levels: whether levels may be compared.
        directions: whether directions may be.
        run: whether there are runs, if perhaps without such a value.
    """
    if not ours.count:
        return NOT_COMPARABLE if run else NOT_RUN
    shown = shown if directions else None
    if levels and agrees:
        return REPRODUCED
    if shown == SAME:
        return DIRECTION_ONLY
    if shown == OPPOSITE or (levels and agrees is False):
        return NOT_REPRODUCED
    return TOO_FEW if levels else NOT_COMPARABLE
