"""Which differences are shown: a paired test, ranks, and effect sizes, by scipy and its like.

A difference is shown if Wilcoxon's signed-rank test over the seeds has p < .05 after Holm's
correction over one family: all comparisons of a table. A comparison with fewer seeds than that
family needs is not tested.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection

import numpy as np
import pandas as pd
from scipy import stats

LEVEL = 0.05
POWER = 0.8  # of a test that has the seeds which it needs
WILCOXON_EFFICIENCY = 3 / math.pi  # relative to the t-test, for normal differences
PRINTED = 3  # decimals of a score, after which ranks share what looks equal
RESAMPLES = 2000
FEWEST_FOR_AN_INTERVAL = 3  # pairs
DECIMALS = 9  # of a difference; what comes after them is rounding, and would hide ties
SAME = 10.0**-DECIMALS  # differences that vary less do so by rounding
MOST_EXACT = 13  # differences, up to which scipy computes the exact distribution in any case
COLUMNS = [
    *("a", "b", "pairs", "wins", "losses", "ties", "difference", "low", "high", "effect", "p"),
]
SHOWN, NOT_SHOWN, NOT_TESTED = "shown", "not shown", "not tested"


def enough(pairs: int, comparisons: int) -> bool:
    """Whether Wilcoxon's test can find anything after Holm's correction of so many comparisons.

    The smallest two-sided p-value that it can have is 2 / 2^pairs.
    """
    return comparisons * 2.0 / 2.0**pairs <= LEVEL


def pairs_needed(comparisons: int) -> int:
    """The least number of pairs that are enough."""
    return next(n for n in range(2, 64) if enough(n, comparisons))


def seeds_needed(effect: float, comparisons: int) -> int:
    """How many seeds find a difference of this size in 80 % of all experiments.

    With Wilcoxon's test in the place of Holm's correction that asks most, the first of so many
    comparisons. The power is that of the z-test (n = ((z_a + z_b) / effect)^2) by Wilcoxon's
    asymptotic efficiency for normal differences (3 / pi), with z_a^2 / 2 more because the spread is
    estimated (Guenther 1981), and no fewer than the test needs at all.

    Args:
        effect: the mean difference in units of the standard deviation of the differences.
        comparisons: how many there are in the family.
    """
    level, power = stats.norm.ppf([1 - LEVEL / (2 * comparisons), POWER])
    by_power = ((level + power) / effect) ** 2 / WILCOXON_EFFICIENCY + level**2 / 2
    return max(pairs_needed(comparisons), math.ceil(by_power))


def holm(p: np.ndarray) -> np.ndarray:
    """The p-values after Holm's correction; NaN stays, and counts as the largest."""
    order = np.argsort(p)  # NaN comes last
    # Not statsmodels' multipletests: it collects garbage at every call, a tenth of a second each.
    factors = np.arange(len(p), 0, -1)
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * factors))
    return corrected


def wilcoxon(differences: np.ndarray) -> float:
    """The two-sided p-value of Wilcoxon's signed-rank test; zeros are split (Demsar 2006).

    It is NaN without differences, and 1 if all are zero.
    """
    if not len(differences):
        return math.nan
    differences = np.round(differences, DECIMALS)
    if not differences.any():
        return 1.0
    if len(differences) > MOST_EXACT:
        return float(stats.wilcoxon(differences, zero_method="zsplit").pvalue)
    # What scipy computes for so few with ties, where it takes a tenth of a second for each test.
    ranks = stats.rankdata(np.abs(differences))
    sums = np.zeros(1)  # of the positive ranks, for all signs
    for rank_ in ranks[differences != 0]:
        sums = np.concatenate([sums, sums + rank_])
    found = ranks[differences > 0].sum()
    tails = (sums >= found - SAME).mean(), (sums <= found + SAME).mean()
    return float(min(1.0, 2 * min(tails)))


def interval(differences: np.ndarray) -> tuple[float, float]:
    """The 95 % bootstrap interval (BCa) of the mean difference; NaN where there is none."""
    if len(differences) < FEWEST_FOR_AN_INTERVAL or np.ptp(differences) < SAME:
        return math.nan, math.nan
    with warnings.catch_warnings(action="ignore"):  # that an interval is NaN, which is printed
        found = stats.bootstrap(
            (differences,),
            np.mean,
            n_resamples=RESAMPLES,
            vectorized=True,
            rng=np.random.default_rng(0),
        ).confidence_interval
    return float(found.low), float(found.high)


def beyond(differences: np.ndarray, margin: float) -> np.ndarray:
    """Differences less a margin in the direction of their mean; zeros where that is within it.

    A test of these, with the p-value 1 for zeros, shows a mean difference larger than the margin.
    """
    mean = differences.mean()
    if abs(mean) <= margin:
        return np.zeros_like(differences)
    return differences - np.sign(mean) * margin


def differences(
    blocks: pd.DataFrame, reference: str, *, effects: bool = True, margin: float = 0.0
) -> pd.DataFrame:
    """The differences of all other columns from the reference.

    Args:
        blocks: scores, a row per block (a seed, a condition), a column per method.
        reference: the column that is `b` in all pairs.
        effects: also compute the bootstrap intervals.
        margin: `p` is that of a difference which is larger.

    Returns:
        A row per pair with rows in common: `a`, `b`, `pairs`, `wins`, `losses`, `ties`,
        `difference` (the mean of a - b), `low` and `high` (its bootstrap interval), `effect`
        (Cohen's d_z: the mean difference in units of its standard deviation), and `p` of Wilcoxon's
        test, without a correction.
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
    """What is shown of differences, all of which are one family of tests.

    Args:
        found: a row for each comparison, with `pairs`, and `p` without a correction.
        untested: the `a` of comparisons that are not tested for another reason.

    Returns:
        The same with `p` after Holm's correction, NaN where nothing was tested, and `verdict`.
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
    """What is shown of one table of scores: `differences`, and then `decide`."""
    return decide(differences(blocks, reference, effects=effects, margin=margin), untested)


def mean_ranks(blocks: pd.DataFrame) -> pd.Series:
    """The mean rank of each column, 1 is best; scores that are printed alike share one."""
    return blocks.round(PRINTED).rank(axis=1, ascending=False).mean()
