"""The median, the trimmed mean and Krum, against values by hand, NumPy and Flower."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from flwr.server.strategy.aggregate import (
    aggregate_krum,
    aggregate_median,
    aggregate_trimmed_avg,
)
from maths.cases import named_case

from fedhet.core.server import merging as robust


def drawn(k: int, n: int = 7) -> torch.Tensor:
    draw = torch.Generator().manual_seed(k)
    return torch.randn(k, n, generator=draw, dtype=torch.float64)


def results(values: torch.Tensor) -> list[tuple[list[np.ndarray], int]]:
    """As Flower takes them; it counts the samples of the mean after Krum, here the same."""
    return [([row.numpy()], 1) for row in values]


def test_the_median_by_hand() -> None:
    three = torch.tensor([[1.0, -5], [9, 2], [2, 0]])
    assert robust.coordinate_median(three).tolist() == [2, 0]
    four = torch.tensor([[1.0, -5], [9, 2], [2, 0], [3, 1e9]])
    assert robust.coordinate_median(four).tolist() == [2.5, 1]


def test_the_trimmed_mean_by_hand() -> None:
    five = torch.tensor([[1.0], [2], [30], [-400], [6]])
    assert robust.trimmed_mean(five, 0.2).tolist() == [3]  # of 1, 2, 6
    assert robust.trimmed_mean(five, 0.39).tolist() == [3]  # 1.95 of five is rounded down
    assert robust.trimmed_mean(five, 0.4).tolist() == [2]
    hundred = torch.arange(100.0)[:, None] ** 2
    middle = [k**2 for k in range(29, 71)]  # .29 * 100 is 28.999999999999996
    assert robust.trimmed_mean(hundred, 0.29).item() == pytest.approx(sum(middle) / 42)


def test_flower_says_the_same() -> None:
    for k in [1, 2, 3, 6, 7]:
        with named_case(k):
            values = drawn(k)
            expected = aggregate_median(results(values))
            np.testing.assert_array_equal(robust.coordinate_median(values), expected[0])
            for share in (0.0, 0.2, 0.4):
                expected = aggregate_trimmed_avg(results(values), share)
                trimmed = robust.trimmed_mean(values, share)
                np.testing.assert_allclose(trimmed, expected[0], rtol=1e-14, atol=1e-15)


def test_the_order_does_not_matter_bit_for_bit() -> None:
    values = drawn(5)
    for order in itertools.permutations(range(5)):
        other = values[list(order)]
        assert torch.equal(robust.coordinate_median(other), robust.coordinate_median(values))
        assert torch.equal(robust.trimmed_mean(other, 0.2), robust.trimmed_mean(values, 0.2))
        scores = robust.krum_scores(robust.squared_distances(other), 1)
        before = robust.krum_scores(robust.squared_distances(values), 1)
        assert torch.equal(scores, before[list(order)])


def test_krum_by_hand() -> None:
    """On a line, at 0, 1, 3, 4 and 100, with one attacker: the two nearest of the others."""
    points = torch.tensor([[0.0], [1], [3], [4], [100]], dtype=torch.float64)
    distances = robust.squared_distances(points)
    assert distances[1].tolist() == [1, 0, 4, 9, 99**2]
    scores = robust.krum_scores(distances, 1)
    assert scores.tolist() == [1 + 9, 1 + 4, 1 + 4, 1 + 9, 96**2 + 97**2]


def test_the_updates_of_equal_clients_are_at_no_distance() -> None:
    """Scalar products would leave something of the size of the squared norm's rounding."""
    values = 1e6 * drawn(1).repeat(5, 1)
    values[4] += 1e-3
    assert robust.krum_scores(robust.squared_distances(values), 1)[:4].tolist() == [0] * 4


def test_flower_selects_the_same() -> None:
    for k, attackers in [(5, 1), (7, 2), (9, 1), (10, 3)]:
        with named_case(k, attackers):
            values = drawn(k)
            order = robust.krum_scores(robust.squared_distances(values), attackers).argsort()
            assert torch.equal(
                values[order[0]], torch.from_numpy(aggregate_krum(results(values), attackers, 0)[0])
            )
            (several,) = aggregate_krum(results(values), attackers, 3)
            np.testing.assert_allclose(values[order[:3]].mean(0), several, rtol=1e-14, atol=1e-15)


def test_krum_refuses_too_few() -> None:
    """Where Flower goes on with at least one neighbour, although nothing is known about it."""
    with pytest.raises(ValueError, match="least 7 updates, got 6"):
        robust.krum_scores(robust.squared_distances(drawn(6)), 2)
