"""Statistics of a comparison: a paired test, intervals, ranks and effect sizes.

A difference is shown if Wilcoxon's signed-rank test over the seeds has p < .05 after Holm's
correction. All comparisons of a table are one family. A comparison is not tested if it has fewer
seeds than the family needs.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from statistics import NormalDist

import numpy as np
import pandas as pd

LEVEL = 0.05
POWER = 0.8  # of a test with `seeds_needed` seeds
WILCOXON_EFFICIENCY = 3 / math.pi  # relative to the t-test, for normal differences
PRINTED = 3  # decimals of a printed score; scores that are equal in them share their ranks
RESAMPLES = 2000
FEWEST_FOR_AN_INTERVAL = 3  # pairs
DECIMALS = 9  # of a difference; later digits are rounding errors, and would hide ties
SAME = 10.0**-DECIMALS  # smaller variations of differences are rounding errors
MOST_EXACT = 13  # up to so many differences, scipy always computes the exact distribution
COLUMNS = [
    *("a", "b", "pairs", "wins", "losses", "ties", "difference", "low", "high", "effect", "p"),
]
NORMAL = NormalDist()
SHOWN, NOT_SHOWN, NOT_TESTED = "shown", "not shown", "not tested"


def enough(pairs: int, comparisons: int) -> bool:
    """Whether Wilcoxon's test can show a difference after Holm's correction.

    The smallest possible two-sided p-value is 2 / 2^pairs.

    Args:
        pairs: number of pairs (seeds).
        comparisons: number of comparisons in the family.
    """
    return comparisons * 2.0 / 2.0**pairs <= LEVEL


def pairs_needed(comparisons: int) -> int:
    """Return the smallest number of pairs that is enough for so many comparisons."""
    return next(n for n in range(2, 64) if enough(n, comparisons))


def seeds_needed(effect: float, comparisons: int) -> int:
    """Return the number of seeds that finds a difference of this size in 80 % of experiments.

    The level of the test is the strictest level of Holm's correction, 0.05 / comparisons. The
    number is the z-test's, n = ((z_a + z_b) / effect)^2, divided by Wilcoxon's asymptotic
    efficiency for normal differences (3 / pi). z_a^2 / 2 is added, because the spread is estimated
    (Guenther 1981). The result is at least `pairs_needed`.

    Args:
        effect: the mean difference divided by the standard deviation of the differences.
        comparisons: number of comparisons in the family.
    """
    level, power = map(NORMAL.inv_cdf, (1 - LEVEL / (2 * comparisons), POWER))
    by_power = ((level + power) / effect) ** 2 / WILCOXON_EFFICIENCY + level**2 / 2
    return max(pairs_needed(comparisons), math.ceil(by_power))


def holm(p: np.ndarray) -> np.ndarray:
    """Apply Holm's correction to p-values; NaN stays NaN, and counts as the largest value."""
    order = np.argsort(p)  # NaN comes last
    # statsmodels' multipletests collects garbage at every call, which takes a tenth of a second.
    factors = np.arange(len(p), 0, -1)
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * factors))
    return corrected


def wilcoxon(differences: np.ndarray) -> float:
    """Return the two-sided p-value of Wilcoxon's signed-rank test; zeros are split (Demsar 2006).

    It is NaN without differences, and 1 if all differences are zero.
    """
    if not len(differences):
        return math.nan
    differences = np.round(differences, DECIMALS)
    if not differences.any():
        return 1.0
    if len(differences) > MOST_EXACT:
        from scipy import stats  # takes a second

        return float(stats.wilcoxon(differences, zero_method="zsplit").pvalue)
    # The exact distribution as in scipy, which takes a tenth of a second for a test with ties.
    ranks = pd.Series(np.abs(differences)).rank().to_numpy()
    sums = np.zeros(1)  # of the positive ranks, for all signs
    for rank_ in ranks[differences != 0]:
        sums = np.concatenate([sums, sums + rank_])
    found = ranks[differences > 0].sum()
    tails = (sums >= found - SAME).mean(), (sums <= found + SAME).mean()
    return float(min(1.0, 2 * min(tails)))


def interval(differences: np.ndarray) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean difference; NaN if there is none.

    It is the BCa interval of Efron and Tibshirani 1993, section 14.3, with the numbers of scipy's
    function, which takes a second to import.
    """
    count = len(differences)
    if count < FEWEST_FOR_AN_INTERVAL or np.ptp(differences) < SAME:
        return math.nan, math.nan
    drawn = np.random.default_rng(0).integers(0, count, (RESAMPLES, count))
    mean, means = differences.mean(), differences[drawn].mean(axis=1)
    bias = NORMAL.inv_cdf(((means < mean).mean() + (means <= mean).mean()) / 2)
    gaps = differences - mean
    acceleration = (gaps**3).sum() / (6 * (gaps**2).sum() ** 1.5)
    ends = bias + NORMAL.inv_cdf(LEVEL / 2), bias - NORMAL.inv_cdf(LEVEL / 2)
    levels = [NORMAL.cdf(bias + end / (1 - acceleration * end)) for end in ends]
    low, high = np.quantile(means, levels)
    return float(low), float(high)


def beyond(differences: np.ndarray, margin: float) -> np.ndarray:
    """Subtract a margin in the direction of the mean; return zeros if the mean is within it.

    A test of the result shows whether the mean difference exceeds the margin (zeros have p = 1).
    """
    mean = differences.mean()
    if abs(mean) <= margin:
        return np.zeros_like(differences)
    return differences - np.sign(mean) * margin


def differences(
    blocks: pd.DataFrame, reference: str, *, effects: bool = True, margin: float = 0.0
) -> pd.DataFrame:
    """Compute the differences of all other columns from the reference.

    Args:
        blocks: scores, a row per block (a seed, a condition), a column per method.
        reference: the column that is `b` in all pairs.
        effects: also compute the bootstrap intervals.
        margin: `p` tests whether the difference is larger than this.

    Returns:
        A row per pair with rows in common: `a`, `b`, `pairs`, `wins`, `losses`, `ties`,
        `difference` (the mean of a - b), `low` and `high` (its bootstrap interval), `effect`
        (Cohen's d_z: the mean difference divided by the standard deviation of the differences), and
        `p` of Wilcoxon's test, without a correction.
    """
    rows = []
    for name in blocks.columns.drop(reference, errors="ignore"):
        gaps = blocks[name].to_numpy(float) - blocks[reference].to_numpy(float)
        own = np.round(gaps, DECIMALS)
        own = own[~np.isnan(own)]
        if not len(own):
            continue
        mean = float(own.mean())
        low, high = interval(own) if effects else (math.nan, math.nan)
        spread = float(own.std(ddof=1)) if len(own) > 1 else 0.0
        rows.append(
            {
                "a": name,
                "b": reference,
                "pairs": len(own),
                "wins": int((own > 0).sum()),
                "losses": int((own < 0).sum()),
                "ties": int((own == 0).sum()),
                "difference": mean,
                "low": low,
                "high": high,
                "effect": mean / spread if spread > SAME else math.nan,
                "p": wilcoxon(beyond(own, margin)),
            }
        )
    return pd.DataFrame(rows, columns=COLUMNS)


def decide(found: pd.DataFrame, untested: Collection[str] = ()) -> pd.DataFrame:
    """Decide which differences are shown; all of them are one family of tests.

    Args:
        found: a row for each comparison, with `pairs`, and `p` without a correction.
        untested: the `a` of further comparisons that must not be tested.

    Returns:
        The frame with `p` after Holm's correction (NaN if not tested) and `verdict`.
    """
    tested = found["pairs"] >= pairs_needed(len(found))
    if untested:
        tested &= ~found["a"].isin(untested)
    p = holm(found["p"].where(tested).to_numpy(float))
    verdicts = np.where(p < LEVEL, SHOWN, np.where(np.isnan(p), NOT_TESTED, NOT_SHOWN))
    return found.assign(p=p, verdict=verdicts)


def compare(
    blocks: pd.DataFrame,
    reference: str,
    *,
    effects: bool = True,
    margin: float = 0.0,
    untested: Collection[str] = (),
) -> pd.DataFrame:
    """Compute `differences` of a table of scores, and `decide` which are shown."""
    return decide(differences(blocks, reference, effects=effects, margin=margin), untested)


def mean_ranks(blocks: pd.DataFrame) -> pd.Series:
    """Return the mean rank of each column; 1 is best, and scores printed alike share a rank."""
    return blocks.round(PRINTED).rank(axis=1, ascending=False).mean()
