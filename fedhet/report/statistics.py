"""Which differences are real: paired tests, ranks, and effect sizes, by scipy and its like."""

from __future__ import annotations

import math
import warnings
from itertools import combinations

import numpy as np
import pandas as pd
from scipy import stats

LEVEL = 0.05
POWER = 0.8  # of a test that has the seeds which it needs
WILCOXON_EFFICIENCY = 3 / math.pi  # relative to the t-test, for normal differences
PRINTED = 3  # decimals of a score, after which ranks share what looks equal
RESAMPLES = 2000
FEWEST_FOR_T = 3  # pairs; with two, nothing can be told from anything
DECIMALS = 9  # of a difference; what comes after them is rounding, and would hide ties
SAME = 10.0**-DECIMALS  # differences that vary less do so by rounding
MOST_EXACT = 13  # differences, up to which scipy computes the exact distribution in any case
COLUMNS = [
    *("a", "b", "pairs", "wins", "losses", "ties", "difference", "low", "high", "effect"),
    *("wilcoxon", "t_test"),
]


def smallest_p(pairs: int) -> float:
    """The smallest two-sided p-value that Wilcoxon's signed-rank test can have: 2 / 2^pairs."""
    return min(1.0, 2.0 / 2.0**pairs)


def enough(pairs: int, comparisons: int) -> bool:
    """Whether Wilcoxon's test can find anything after Holm's correction of so many comparisons."""
    return comparisons * smallest_p(pairs) <= LEVEL


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
    """The p-values after Holm's correction; those that are NaN stay, and do not count."""
    corrected = np.full(len(p), math.nan)
    known = np.flatnonzero(~np.isnan(p))
    order = known[np.argsort(p[known])]
    # Not statsmodels' multipletests: it collects garbage at every call, a tenth of a second each.
    factors = np.arange(len(order), 0, -1)
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


def t_test(differences: np.ndarray) -> float:
    """The two-sided p-value of the paired t-test; NaN where it cannot be made."""
    if len(differences) < FEWEST_FOR_T:
        return math.nan
    if not differences.any():
        return 1.0
    # Differences that do not vary beyond rounding would make any of them infinitely certain.
    if np.ptp(differences) < SAME:
        return math.nan
    return float(stats.ttest_1samp(differences, 0).pvalue)


def interval(differences: np.ndarray) -> tuple[float, float]:
    """The 95 % bootstrap interval (BCa) of the mean difference; NaN where there is none."""
    if len(differences) < FEWEST_FOR_T or np.ptp(differences) < SAME:
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


def couples(blocks: pd.DataFrame, reference: str | None = None) -> dict[tuple[str, str], int]:
    """All pairs of columns with rows in common -> how many; they are one family of tests.

    With a reference, only the pairs of each other column with it.
    """
    known = blocks.notna()
    pairs = list(combinations(blocks.columns, 2))
    if reference is not None:
        pairs = [(name, reference) for name in blocks if name != reference]
    shared = {(a, b): int((known[a] & known[b]).sum()) for a, b in pairs}
    return {couple: rows for couple, rows in shared.items() if rows}


def compare(
    blocks: pd.DataFrame,
    reference: str | None = None,
    *,
    effects: bool = True,
    margin: float = 0.0,
) -> pd.DataFrame:
    """Compare all columns in pairs, or each with the reference, over the rows that both have.

    Args:
        blocks: scores, a row per block (a seed, a condition), a column per method.
        reference: the column that is `b` in all pairs; None compares all columns with each other.
        effects: also compute the bootstrap intervals.
        margin: the tests are for differences that are larger.

    Returns:
        A row per pair with rows in common: `a` (without a reference the better one by its mean),
        `b`, `pairs`, `wins`, `losses`, `ties`, `difference` (the mean of a - b), `low` and `high`
        (its bootstrap interval), `effect` (Cohen's d_z: the mean difference in units of its
        standard deviation), `wilcoxon` and `t_test` (p-values after Holm's correction; all of
        Wilcoxon's are NaN if a couple has not enough pairs, so that one test decides on all), and
        `verdict`.
    """
    family = couples(blocks, reference)
    place = {name: i for i, name in enumerate(blocks.columns)}
    values = blocks.to_numpy(float)
    decided_by_wilcoxon = enough(min(family.values(), default=0), len(family))
    rows = []
    for (a, b), n in family.items():
        differences = np.round(values[:, place[a]] - values[:, place[b]], DECIMALS)
        differences = differences[~np.isnan(differences)]
        mean = float(differences.mean())
        if mean < 0 and reference is None:
            a, b, mean, differences = b, a, -mean, -differences
        low, high = interval(differences) if effects else (math.nan, math.nan)
        tested = beyond(differences, margin)
        spread = float(differences.std(ddof=1)) if n > 1 else 0.0
        rows.append(
            {
                "a": a,
                "b": b,
                "pairs": n,
                "wins": int((differences > 0).sum()),
                "losses": int((differences < 0).sum()),
                "ties": int((differences == 0).sum()),
                "difference": mean,
                "low": low,
                "high": high,
                "effect": mean / spread if spread > SAME else math.nan,
                "wilcoxon": wilcoxon(tested) if decided_by_wilcoxon else math.nan,
                "t_test": t_test(tested),
            }
        )
    frame = pd.DataFrame(rows, columns=COLUMNS)
    for test in ("wilcoxon", "t_test"):
        frame[test] = holm(frame[test].to_numpy(float))
    frame["verdict"] = list(map(verdict, frame["wilcoxon"], frame["t_test"]))
    return frame


REAL, IF_NORMAL, NOT_SHOWN = "real", "if normal", "not shown"


def verdict(p_wilcoxon: float, p_t: float) -> str:
    """What two corrected p-values say: the second counts only where there is no first."""
    if not math.isnan(p_wilcoxon):
        return REAL if p_wilcoxon < LEVEL else NOT_SHOWN
    return IF_NORMAL if p_t < LEVEL else NOT_SHOWN


def mean_ranks(blocks: pd.DataFrame) -> pd.Series:
    """The mean rank of each column, 1 is best; scores that are printed alike share one."""
    return blocks.round(PRINTED).rank(axis=1, ascending=False).mean()
