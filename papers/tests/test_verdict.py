"""The rule: every branch, on samples that are made so that the answer is known."""

from __future__ import annotations

import math

import pytest

from papers.verdict import (
    DIRECTION_ONLY,
    NOT_COMPARABLE,
    NOT_REPRODUCED,
    NOT_RUN,
    NOT_SHOWN,
    OPPOSITE,
    REPRODUCED,
    SAME,
    Sample,
    direction,
    level,
    verdict,
)

# Mean .80, standard deviation .01, standard error .01 / sqrt(4) = .005.
FOUR = Sample((0.80 - 0.015 / math.sqrt(3), 0.80 + 0.015 / math.sqrt(3)) * 2)


def test_the_sample_says_what_statistics_books_say() -> None:
    sample = Sample((1.0, 3.0))
    assert sample.mean == 2
    assert sample.spread == pytest.approx(math.sqrt(2))
    assert sample.error == pytest.approx(1.0)
    assert (Sample((1.0,)).spread, Sample((1.0,)).error) == (None, None)
    assert math.isnan(Sample(()).mean)


def test_a_level_agrees_within_two_standard_errors_or_the_papers_spread() -> None:
    assert FOUR.error == pytest.approx(0.005)
    assert level(FOUR, 0.81, None)  # two standard errors away
    assert not level(FOUR, 0.8101, None)
    assert level(FOUR, 0.84, 0.04)  # the paper's spread is the wider one
    assert not level(FOUR, 0.85, 0.04)
    assert level(FOUR, 0.809, 0.001)  # ours is


def test_a_level_needs_a_width() -> None:
    one = Sample((0.8,))
    assert level(one, 0.8, None) is None
    assert level(one, 0.81, 0.02) is True
    assert level(one, 0.83, 0.02) is False
    assert level(Sample(()), 0.8, 0.1) is None
    # Equal runs have a width: 0.
    assert level(Sample((2.0, 2.0)), 2.0, None) is True
    assert level(Sample((2.0, 2.0)), 2.001, None) is False


@pytest.mark.parametrize(
    ("differences", "sign", "shown"),
    [
        ((0.1, 0.12, 0.11), 1, SAME),
        ((0.1, 0.12, 0.11), -1, OPPOSITE),
        ((-30.0, -40.0), -38, SAME),
        ((0.1, -0.1, 0.02), 1, NOT_SHOWN),
        ((0.1,), 1, NOT_SHOWN),  # one seed shows nothing
        ((), 1, NOT_SHOWN),
        ((0.1, 0.12), 0, NOT_SHOWN),  # the paper has no order
        ((0.1, 0.1), 1, SAME),
        ((0.0, 0.0), 1, NOT_SHOWN),
        # The mean .2 of these three is two standard errors of .1: it does not exceed them.
        ((0.2 - 0.1 * math.sqrt(3), 0.2, 0.2 + 0.1 * math.sqrt(3)), 1, NOT_SHOWN),
        ((0.21 - 0.1 * math.sqrt(3), 0.21, 0.21 + 0.1 * math.sqrt(3)), 1, SAME),
    ],
)
def test_a_direction_exceeds_two_standard_errors(
    differences: tuple[float, ...], sign: float, shown: str
) -> None:
    assert direction(differences, sign) == shown


@pytest.mark.parametrize(
    ("agrees", "shown", "at_paper", "at_cpu"),
    [
        (True, SAME, REPRODUCED, DIRECTION_ONLY),
        (True, OPPOSITE, REPRODUCED, NOT_REPRODUCED),
        (True, None, REPRODUCED, NOT_COMPARABLE),
        (False, SAME, DIRECTION_ONLY, DIRECTION_ONLY),
        (False, NOT_SHOWN, NOT_REPRODUCED, NOT_COMPARABLE),
        (False, OPPOSITE, NOT_REPRODUCED, NOT_REPRODUCED),
        (False, None, NOT_REPRODUCED, NOT_COMPARABLE),
        # A claim, which has no level.
        (None, SAME, DIRECTION_ONLY, DIRECTION_ONLY),
        (None, NOT_SHOWN, NOT_REPRODUCED, NOT_COMPARABLE),
        (None, OPPOSITE, NOT_REPRODUCED, NOT_REPRODUCED),
    ],
)
def test_the_verdict(agrees: bool | None, shown: str | None, at_paper: str, at_cpu: str) -> None:
    assert verdict(FOUR, agrees, shown, levels=True, directions=True) == at_paper
    assert verdict(FOUR, agrees, shown, levels=False, directions=True) == at_cpu
    assert verdict(FOUR, agrees, shown, levels=False, directions=False) == NOT_COMPARABLE


def test_without_runs_there_is_no_verdict_and_one_run_shows_little() -> None:
    kinds = {"levels": True, "directions": True}
    assert verdict(Sample(()), None, None, **kinds, run=False) == NOT_RUN
    assert verdict(Sample(()), None, None, **kinds, run=True) == NOT_COMPARABLE
    assert verdict(Sample((0.8,)), None, NOT_SHOWN, levels=True, directions=True) == NOT_COMPARABLE
