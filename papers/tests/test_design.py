"""The error rates of a design, on pools with known error rates."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from papers import design
from papers.design import COMPARISONS, Design

RATES = [0.01, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 3]


def pool(validation: np.ndarray, test: np.ndarray, setting: str = "one") -> pd.DataFrame:
    """The rows of a csv file, from scores (rates, seeds)."""
    rows = []
    for i, rate in enumerate(RATES):
        for seed in range(test.shape[1]):
            scores = {"validation": validation[i, seed], "test": test[i, seed]}
            rows.append({"setting": setting, "client.lr": rate, "seed": seed, **scores})
    return pd.DataFrame(rows)


def noise(seed: int, spread: float = 0.02) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, (len(RATES), 40))


def test_equal_rates_raise_no_false_alarm_and_gaps_of_many_spreads_are_found() -> None:
    """If all rates are equally good, only the noise of the seeds is left."""
    found = design.rates(pool(noise(1), 0.8 + noise(2)), Design(1, 10))["one"]
    assert found.false_alarms <= 0.05
    # Ten pairs reach the level of all comparisons only if all have the same sign. Normal
    # differences with the spread of two scores do so in 68 % of the draws at .05, 94 % at .07.
    assert 2 / 2**10 * COMPARISONS < 0.05 < 2 * 2 / 2**10 * COMPARISONS
    one_sign = {gap: stats.norm.cdf(gap / (0.02 * 2**0.5)) ** 10 for gap in design.GAPS}
    expected = next(gap for gap, share in one_sign.items() if share >= design.POWER)
    assert found.smallest_gap == expected == 0.07


def test_tuning_on_one_seed_raises_false_alarms_which_the_margin_stops() -> None:
    """One of two rates is ten points better, but validation cannot choose between them."""
    test = 0.8 + noise(1, 0.002)
    test[: len(RATES) // 2] -= 0.1
    cells = pool(noise(2), test)
    alarms = design.rates(cells, Design(1, 10))["one"].false_alarms
    # The methods choose different rates in half of the draws; then all ten seeds show it.
    assert alarms == pytest.approx(0.5, abs=0.1)
    assert design.margins(cells, Design(1, 10))["one"] == pytest.approx(0.1, abs=0.01)
    assert design.rates(cells, Design(1, 10, margin=True))["one"].false_alarms < 0.05


@pytest.mark.parametrize("step", [0.03, 0.0])
def test_the_margin_covers_a_step_of_the_grid(step: float) -> None:
    """The rates between the grid's rates are better by a step, for every seed."""
    scores = np.full((len(RATES), 40), 0.8)
    scores[[RATES.index(rate) for rate in (0.05, 0.2, 0.5, 2)]] += step
    cells = pool(scores, scores)
    assert design.margins(cells, design.TODAY) == pytest.approx({"one": step, "all": step})
    bare = design.rates(cells, Design(8, 12))["all"]
    assert bare.false_alarms == float(step > 0)  # two methods that are equal but for their grids
    assert design.rates(cells, design.TODAY)["all"].false_alarms == 0


def test_a_setting_has_the_grid_of_its_board() -> None:
    scores = np.arange(len(RATES))[:, None] + noise(1)  # the largest rate of a grid is its best one
    for setting, best in (("digits, 2 classes", 3), ("heart_disease, hospitals", 1)):
        (found,) = design.pools(pool(scores, scores, setting)).values()
        chosen = design.choices(found, design.TODAY, design.drawn_seeds(40))
        assert {RATES[row] for row in chosen} == {best}


def test_the_cost_of_a_choice_is_its_distance_from_the_best() -> None:
    test = np.zeros((len(RATES), 40)) + np.arange(len(RATES))[:, None] / 100
    validation = np.tile(np.arange(len(RATES))[::-1, None], (1, 40)).astype(float)  # all wrong
    (found,) = design.pools(pool(validation, test)).values()
    chosen = design.choices(found, Design(1, 0), design.drawn_seeds(40))
    assert set(chosen) == {0}
    assert design.costs(found, chosen) == pytest.approx(0.09)


def test_a_rate_at_which_a_trial_diverges_is_not_chosen() -> None:
    validation = noise(1)
    validation[3] = 1.0
    validation[3, 7] = np.nan
    (found,) = design.pools(pool(validation, noise(2))).values()
    order = design.drawn_seeds(40, draws=3)
    assert 3 not in design.choices(found, Design(40, 0), order)
    others = np.setdiff1d(np.arange(40), [7])[None]
    assert design.choices(found, Design(39, 0), others) == [3]


def test_comparisons_are_tuned_and_compared_on_different_seeds() -> None:
    """Each score is the number of its seed, so scores show the seeds of a comparison."""
    seeds = np.tile(np.arange(40.0), (len(RATES), 1))
    (found,) = design.pools(pool(seeds, seeds)).values()
    plan, order = Design(5, 10), design.drawn_seeds(40, draws=20)
    assert (design.differences(found, plan, order, paired=True) == 0).all()
    apart = design.differences(found, plan, order, paired=False)
    assert (apart != 0).all()
    for row, chosen in zip(apart, order, strict=True):
        assert row.tolist() == (chosen[-20:-10] - chosen[-10:]).tolist()
        assert len({*chosen[:10], *chosen[-20:]}) == 30
