"""The tests of a report give the numbers of worked examples, and of other implementations."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fedhet.study.report import statistics

# Demsar 2006 (JMLR 7), table 6: the area under the curve on 14 data sets.
DEMSAR = pd.DataFrame(
    {
        "C4.5": [
            *(0.763, 0.599, 0.954, 0.628, 0.882, 0.936, 0.661),
            *(0.583, 0.775, 1.000, 0.940, 0.619, 0.972, 0.957),
        ],
        "C4.5+m": [
            *(0.768, 0.591, 0.971, 0.661, 0.888, 0.931, 0.668),
            *(0.583, 0.838, 1.000, 0.962, 0.666, 0.981, 0.978),
        ],
    }
)


@pytest.mark.parametrize("pairs", [3, 7, 10])
def test_wilcoxon_with_ties_is_scipys_exact_test(pairs: int) -> None:
    draws = np.random.default_rng(pairs)
    for decimals in (0, 1, 3):
        differences = draws.normal(0.4, 1, pairs).round(decimals)
        differences[0] = 0
        expected = stats.wilcoxon(differences, zero_method="zsplit").pvalue
        assert statistics.wilcoxon(differences) == pytest.approx(expected, abs=1e-12)


def test_wilcoxon_with_split_zeros_is_demsars_example() -> None:
    """He finds the rank sums 93 and 12, and a difference at the level .05."""
    differences = (DEMSAR["C4.5+m"] - DEMSAR["C4.5"]).round(3).to_numpy()
    assert stats.wilcoxon(differences, zero_method="zsplit").statistic == 12
    z = (12 - 14 * 15 / 4) / math.sqrt(14 * 15 * 29 / 24)  # his normal approximation
    assert statistics.wilcoxon(differences) == pytest.approx(2 * stats.norm.cdf(z), abs=0.004)
    assert statistics.wilcoxon(differences) < 0.05


def test_wilcoxon_with_many_zeros_splits_their_ranks() -> None:
    """Of 20 differences 6 are zero; without these the p-value would be .074."""
    differences = np.array([*[0] * 6, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, -11, 12, -13, 14], float)
    zeros = 6 * 3.5  # the sum of their ranks, half of which each sum has
    smaller = (11 + 6) + (13 + 6) + zeros / 2
    tied = (6**3 - 6) / 48
    z = (smaller - 20 * 21 / 4) / math.sqrt(20 * 21 * 41 / 24 - tied)
    assert statistics.wilcoxon(differences) == pytest.approx(2 * stats.norm.cdf(z), abs=1e-12)


def test_differences_that_rounding_tells_apart_are_ties() -> None:
    better = np.array([0.8, 0.9, 0.3, 0.6, 0.5, 0.75])
    worse = np.array([0.7, 0.8, 0.2, 0.7, 0.4, 0.55])  # five differences of 0.1, and one of 0.2
    assert len(set(better - worse)) > 3
    exact = np.array([0.1, 0.1, 0.1, -0.1, 0.1, 0.2])
    assert statistics.wilcoxon(better - worse) == statistics.wilcoxon(exact)


def test_holm_by_hand() -> None:
    """.01 * 5; .02 * 4; .03 * 3; .04 * 2 is not below that; what is not tested counts as one."""
    p = np.array([0.03, 0.01, math.nan, 0.04, 0.02])
    expected = [0.09, 0.05, math.nan, 0.09, 0.08]
    assert statistics.holm(p) == pytest.approx(expected, nan_ok=True)


def test_holm_is_that_of_statsmodels() -> None:
    from statsmodels.stats import multitest

    p = np.random.default_rng(0).uniform(0, 0.2, 30)
    assert statistics.holm(p) == pytest.approx(multitest.multipletests(p, method="holm")[1])


@pytest.mark.parametrize("pairs", range(3, 12))
def test_the_smallest_p_is_what_wilcoxon_gives_at_most(pairs: int) -> None:
    differences = np.arange(1, pairs + 1) / 7
    assert statistics.wilcoxon(differences) == pytest.approx(2 / 2**pairs)


def test_pairs_that_are_enough() -> None:
    assert not statistics.enough(5, 1) and statistics.enough(6, 1)
    assert statistics.pairs_needed(1) == 6
    assert statistics.pairs_needed(21) == 10  # 21 * 2 / 2^10 = .041, and .082 with one pair less


def blocks(seeds: int, **shifts: float) -> pd.DataFrame:
    noise = np.random.default_rng(1)
    return pd.DataFrame(
        {name: shift + 0.01 * noise.normal(size=seeds) for name, shift in shifts.items()}
    )


def test_a_difference_is_shown() -> None:
    (row,) = statistics.compare(blocks(12, worse=0.5, better=0.6), "worse").itertuples()
    assert (row.a, row.b, row.pairs, row.wins) == ("better", "worse", 12, 12)
    assert row.verdict == statistics.SHOWN
    assert row.p == pytest.approx(2 / 2**12)
    assert row.low < 0.1 < row.high and row.low > 0.08


@pytest.mark.parametrize(("seeds", "verdict"), [(8, "shown"), (7, "not tested")])
def test_a_comparison_with_fewer_seeds_than_its_family_needs_is_not_tested(
    seeds: int, verdict: str
) -> None:
    """Six comparisons need 8 seeds: 6 * 2 / 2^8 = .047. All of theirs have the same sign."""
    table = blocks(seeds, ref=0.1, a=0.9, b=0.8, c=0.7, d=0.6, e=0.5, f=0.4)
    (found, *_) = statistics.compare(table, "ref").itertuples()
    assert found.verdict == verdict
    assert math.isnan(found.p) == (verdict == statistics.NOT_TESTED)


def test_what_is_not_tested_stays_in_the_family() -> None:
    """Both comparisons count: the p-value of the one that is tested is 2 * 2 / 2^7."""
    table = blocks(7, ref=0.5, few=0.9, whole=0.8)
    table.loc[0, "few"] = math.nan
    found = statistics.compare(table, "ref").set_index("a")
    assert found.loc["few", "verdict"] == statistics.NOT_TESTED
    assert found.loc["whole", "p"] == pytest.approx(2 * 2 / 2**7)
    again = statistics.compare(table, "ref", untested=["whole"])
    assert set(again["verdict"]) == {statistics.NOT_TESTED} and again["p"].isna().all()


def test_equal_methods_do_not_differ() -> None:
    same = pd.DataFrame({"a": np.arange(6) / 10, "b": np.arange(6) / 10})
    (row,) = statistics.compare(same, "b").itertuples()
    assert (row.p, row.ties, row.verdict) == (1.0, 6, statistics.NOT_SHOWN)


def test_a_missing_score_takes_away_its_pairs_only() -> None:
    table = blocks(8, a=0.9, b=0.5, c=0.4)
    table.loc[0, "a"] = math.nan
    pairs = statistics.compare(table, "c").set_index("a")["pairs"]
    assert pairs.to_dict() == {"a": 7, "b": 8}


@pytest.mark.parametrize("count", [3, 10, 40])
def test_the_interval_is_the_one_of_scipy(count: int) -> None:
    draw = np.random.default_rng(count)
    for sample in (draw.normal(0.01, 0.02, count), draw.integers(0, 4, count) / 100):
        expected = stats.bootstrap(
            (sample,), np.mean, n_resamples=2000, rng=np.random.default_rng(0)
        ).confidence_interval
        assert statistics.interval(sample) == pytest.approx(tuple(expected), rel=1e-9)


def test_a_report_needs_neither_torch_nor_hydra_nor_the_statistics_of_scipy() -> None:
    code = "import sys, fedhet.study.report.page; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "flwr", "hydra", "scipy.stats"}.intersection(done.stdout.split())


def test_the_interval_of_many_differences_is_the_normal_one() -> None:
    sample = np.random.default_rng(5).normal(0.3, 1, 400)
    low, high = statistics.interval(sample)
    error = 1.96 * sample.std(ddof=1) / 20
    assert (low, high) == pytest.approx((sample.mean() - error, sample.mean() + error), abs=0.02)


def test_too_few_differences_have_no_p_value() -> None:
    nothing = np.zeros(0)
    assert math.isnan(statistics.wilcoxon(nothing)) and statistics.wilcoxon(np.zeros(3)) == 1


def test_a_pair_without_a_common_block_is_no_comparison() -> None:
    """Holm's factors are then 2 and 1 for the two pairs that there are, and 7 pairs are enough."""
    table = blocks(14, a=0.9, b=0.5, c=0.4)
    table.loc[:6, "b"] = table.loc[7:, "c"] = math.nan
    pairs = statistics.compare(table, "a")
    assert [(row.a, row.b) for row in pairs.itertuples()] == [("b", "a"), ("c", "a")]
    assert pairs["p"].to_numpy() == pytest.approx([2 * 2 / 2**7] * 2)
    assert statistics.compare(table[["b", "c"]], "c").empty


def test_what_looks_equal_shares_its_rank() -> None:
    scores = pd.DataFrame({"a": [0.9504, 0.9496], "b": [0.9496, 0.9504], "c": [0.8, 0.8]})
    ranks = statistics.mean_ranks(scores.assign(b=[0.9501, 0.9501]))
    assert ranks.to_dict() == {"a": 1.5, "b": 1.5, "c": 3.0}


@pytest.mark.parametrize(("effect", "comparisons"), [(0.5, 1), (0.8, 6), (-1.2, 6)])
def test_the_seeds_needed_find_the_difference_in_four_of_five_experiments(
    effect: float, comparisons: int
) -> None:
    """By simulation with the test itself, at the level that Holm's correction begins with."""
    seeds = statistics.seeds_needed(effect, comparisons)
    draws = np.random.default_rng(0).normal(effect, 1, (2000, seeds))
    p = stats.wilcoxon(draws, axis=1, method="exact").pvalue
    assert (p < statistics.LEVEL / comparisons).mean() == pytest.approx(0.8, abs=0.05)


def test_a_large_difference_still_needs_what_the_test_needs() -> None:
    assert statistics.seeds_needed(50.0, 6) == max(8, math.ceil(stats.norm.isf(0.05 / 12) ** 2 / 2))


def test_the_family_is_the_pairs_with_the_reference() -> None:
    """The sign is that of the other method's gain."""
    table = blocks(8, ref=0.5, better=0.6, worse=0.4)
    found = statistics.compare(table, "ref").set_index("a")
    assert set(found["b"]) == {"ref"} and found.index.tolist() == ["better", "worse"]
    assert found["p"].to_numpy() == pytest.approx([2 * 2 / 2**8] * 2)
    assert found.loc["better", "difference"] == pytest.approx(
        (table["better"] - table["ref"]).mean(), abs=1e-8
    )
    assert found.loc["worse", "difference"] < 0 and found.loc["worse", "low"] < 0
