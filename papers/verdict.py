"""The rule by which a figure counts as reproduced.

Its two standard errors and its five verdicts were fixed before any run; docs/reproduction.md names
what was added later.

Level. Our mean agrees with the paper's figure if it lies within two of our standard errors of it,
or within the spread that the paper prints behind it, whichever is wider. Without either of them (a
single run, and a paper without spreads) a level cannot be judged.

Direction. The difference between a method and its host, or between two settings of which the paper
says that one is better, is taken seed by seed. It is the paper's direction if the mean difference
has the paper's sign and exceeds two of its standard errors; the opposite one if it exceeds them
with the other sign; else it is not shown. One seed shows no direction.

Verdict:
  reproduced        the level agrees
  direction only    the level does not, or was not compared, and the direction is the paper's
  not reproduced    neither; where levels are not compared, only if the direction is the opposite
  not comparable    levels are not compared, because the data or the model are others at this scale
                    or because times are another machine's, and no direction is shown; or a single
                    run is too little to judge; or no run has such a value
  not run           runs are missing
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

REPRODUCED = "reproduced"
DIRECTION_ONLY = "direction only"
NOT_REPRODUCED = "not reproduced"
NOT_COMPARABLE = "not comparable"
NOT_RUN = "not run"
VERDICTS = (REPRODUCED, DIRECTION_ONLY, NOT_REPRODUCED, NOT_COMPARABLE, NOT_RUN)

SAME, OPPOSITE, NOT_SHOWN = "as in the paper", "opposite", "not shown"
ERRORS = 2.0  # standard errors


@dataclass(frozen=True)
class Sample:
    """What was measured, over the seeds.

    Attributes:
        values: one for each run.
    """

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """NaN if there are none."""
        return mean(self.values) if self.values else math.nan

    @property
    def spread(self) -> float | None:
        """The standard deviation; None for less than two runs."""
        return stdev(self.values) if len(self.values) > 1 else None

    @property
    def error(self) -> float | None:
        """The standard error of the mean; None for less than two runs."""
        return None if self.spread is None else self.spread / math.sqrt(len(self.values))


def level(ours: Sample, value: float, spread: float | None) -> bool | None:
    """Whether our mean agrees with the paper's figure; None if that cannot be judged."""
    widths = [width for width in (spread, ours.error and ERRORS * ours.error) if width is not None]
    if not ours.values or not widths:
        return None
    # The figures are printed decimals: the last bit of a difference must not decide.
    return abs(ours.mean - value) <= max(widths) * (1 + 1e-9) + 1e-12


def direction(differences: Sequence[float], sign: float) -> str:
    """What the differences, one for each seed, show.

    Args:
        differences: those in which the paper has `sign`.
        sign: a positive or negative number; 0 if the paper has no difference, which nothing shows.
    """
    sample = Sample(tuple(differences))
    if sample.error is None or not sign or abs(sample.mean) <= ERRORS * sample.error:
        return NOT_SHOWN
    return SAME if (sample.mean > 0) == (sign > 0) else OPPOSITE


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
        agrees: what `level` says; None for a claim, which has no level.
        shown: what `direction` says; None where there is nothing to compare with.
        levels: whether levels may be compared.
        directions: whether directions may be.
        run: whether there are runs, if perhaps without such a value.
    """
    if not ours.values:
        return NOT_COMPARABLE if run else NOT_RUN
    shown = shown if directions else None
    if levels and agrees:
        return REPRODUCED
    if shown == SAME:
        return DIRECTION_ONLY
    judged = agrees is False or (shown == NOT_SHOWN and len(ours.values) > 1)
    if shown == OPPOSITE or (levels and judged):
        return NOT_REPRODUCED
    return NOT_COMPARABLE
