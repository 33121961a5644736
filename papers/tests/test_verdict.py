"""The rule: every branch, on samples with known answers."""

from __future__ import annotations

import math

import pytest

from fedhet.study.report.statistics import NOT_SHOWN, NOT_TESTED
from papers.verdict import (
    DIRECTION_ONLY,
    NOT_COMPARABLE,
    NOT_REPRODUCED,
    NOT_RUN,
    OPPOSITE,
    REPRODUCED,
    SAME,
    Sample,
    directions,
    level,
    verdict,
)

FIVE = Sample(5, 0.80, 0.01)
REACH = 2.131847 * 0.01 / math.sqrt(5)  # of its 90 % interval, by the tables of Student's t


def test_the_sample_says_what_statistics_books_say() -> None:
    sample = Sample.of((1.0, 3.0))
    assert sample == Sample(2, 2.0, pytest.approx(math.sqrt(2)))
    assert sample.error == pytest.approx(1.0)
    assert Sample.of((1.0,)) == Sample(1, 1.0, None) and Sample(1, 1.0, None).error is None
    assert math.isnan(Sample.of(()).mean)


def test_a_level_agrees_where_the_whole_interval_lies_within_the_margin() -> None:
    """The margin is two points of a share; the level differs if the whole interval lies outside."""
    for sign in (1, -1):
        for off, agrees in (
            (0.0, True),
            (0.02 - REACH - 1e-5, True),
            (0.02 - REACH + 1e-5, None),
            (0.02 + REACH - 1e-5, None),
            (0.02 + REACH + 1e-5, False),
        ):
            assert level(FIVE, 0.80 + sign * off, share=True) is agrees


def test_noise_makes_no_level_agree() -> None:
    """The paper's .656 lies within two standard errors of our .421 +- .206."""
    assert level(Sample(3, 0.421, 0.206), 0.656, share=True) is None
    assert level(Sample(5, 0.656, 0.206), 0.656, share=True) is None


def test_a_level_needs_five_seeds_to_agree_and_two_to_differ() -> None:
    assert level(Sample(5, 0.8, 0.0), 0.8, share=True) is True
    assert level(Sample(4, 0.8, 0.0), 0.8, share=True) is None
    assert level(Sample(2, 0.8, 0.0), 0.83, share=True) is False
    assert level(Sample.of((0.8,)), 0.2, share=True) is None
    assert level(Sample.of(()), 0.8, share=True) is None


def test_the_margin_of_what_is_no_share_is_a_part_of_the_figure() -> None:
    rounds = Sample(5, 104.0, 1.0)  # its interval reaches .95 farther
    assert level(rounds, 100.0) is True
    assert level(rounds, 98.0) is False
    assert level(rounds, 99.0) is None
    assert level(Sample(5, -104.0, 1.0), -100.0) is True


def test_a_count_that_no_seed_changes_agrees_within_the_papers_rounding() -> None:
    one = Sample.of((447_406.0,))
    assert level(one, 447_000.0, 500.0) is True
    assert level(one, 446_000.0, 500.0) is False
    assert level(one, 447_406.0, 0.0) is True
    assert level(Sample.of((447_406.0, 447_500.0)), 447_000.0, 500.0) is None  # it has changed


SIX = (0.1, 0.12, 0.11, 0.3, 0.2, 0.05)  # of one sign: p = 2 / 2^6 = .031


@pytest.mark.parametrize(
    ("differences", "sign", "shown"),
    [
        (SIX, 1, SAME),
        (SIX, -1, OPPOSITE),
        (SIX, 0, NOT_SHOWN),  # the paper has no order
        ((-0.01, *SIX[1:]), 1, NOT_SHOWN),  # p = 4 / 2^6 = .062
        ((0.0,) * 6, 1, NOT_SHOWN),
        (SIX[:5], 1, NOT_TESTED),  # the smallest p of five is .062
        ((), 1, NOT_TESTED),
        (tuple(1e-11 * d for d in SIX), 1, SAME),  # what is measured may be small
    ],
)
def test_a_direction_is_shown_by_the_test_of_ranks(
    differences: tuple[float, ...], sign: float, shown: str
) -> None:
    assert directions([(differences, sign)]) == [shown]


def test_a_family_of_two_needs_seven_seeds() -> None:
    """By Holm's correction the smaller p counts twice: 2 * 2 / 2^6 = .062, 2 * 2 / 2^7 = .031."""
    seven, none = (*SIX, 0.1), (0.1, -0.2, 0.3, -0.4, 0.5, -0.6, 0.7)
    assert directions([(SIX, 1), (SIX, 1)]) == [NOT_TESTED] * 2
    assert directions([(seven, 1), (none, 1)]) == [SAME, NOT_SHOWN]
    assert directions([(seven, 1), ((), 1)]) == [SAME, NOT_TESTED]
    assert directions([]) == []


@pytest.mark.parametrize(
    ("agrees", "shown", "at_paper", "at_cpu"),
    [
        (True, SAME, REPRODUCED, DIRECTION_ONLY),
        (True, OPPOSITE, REPRODUCED, NOT_REPRODUCED),
        (True, NOT_TESTED, REPRODUCED, NOT_TESTED),
        (True, None, REPRODUCED, NOT_COMPARABLE),
        (False, SAME, DIRECTION_ONLY, DIRECTION_ONLY),
        (False, NOT_SHOWN, NOT_REPRODUCED, NOT_SHOWN),
        (False, NOT_TESTED, NOT_REPRODUCED, NOT_TESTED),
        (False, OPPOSITE, NOT_REPRODUCED, NOT_REPRODUCED),
        (False, None, NOT_REPRODUCED, NOT_COMPARABLE),
        (None, SAME, DIRECTION_ONLY, DIRECTION_ONLY),
        (None, NOT_SHOWN, NOT_SHOWN, NOT_SHOWN),
        (None, NOT_TESTED, NOT_TESTED, NOT_TESTED),
        (None, OPPOSITE, NOT_REPRODUCED, NOT_REPRODUCED),
        (None, None, NOT_SHOWN, NOT_COMPARABLE),  # five seeds: the level was tested
    ],
)
def test_the_verdict(agrees: bool | None, shown: str | None, at_paper: str, at_cpu: str) -> None:
    assert verdict(FIVE, agrees, shown, levels=True) == at_paper
    assert verdict(FIVE, agrees, shown, levels=False) == at_cpu


def test_a_level_over_few_seeds_is_not_tested() -> None:
    assert verdict(Sample(4, 0.8, 0.01), None, None, levels=True) == NOT_TESTED


def test_without_values_there_is_no_verdict() -> None:
    for run, expected in ((False, NOT_RUN), (True, NOT_COMPARABLE)):
        assert verdict(Sample.of(()), None, NOT_TESTED, levels=True, run=run) == expected
