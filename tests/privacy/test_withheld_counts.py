"""The smallest number of samples of which a client sends a statistic, and who decides it."""

from __future__ import annotations

import pytest
import torch
from composing import composed

from fedhet.data.toy import toy_task
from fedhet.errors import ConfigError
from fedhet.job import Job
from fedhet.privacy.counts import FLOOR, suppressed


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ([4, 3, 9], [0, 0, 9]),
        ([5, 6, 9], [5, 6, 9]),
        ([0, 6, 9], [0, 6, 9]),  # it has none of that class: no sample is told of
        ([4, 0, 9], [0, 0, 9]),
        ([9, 4, 6], [9, 0, 0]),  # 4 = 19 - 15 would follow
        ([9, 4, 9], [0, 0, 9]),
        ([4, 9], [0, 0]),
        ([4], [0]),
    ],
)
def test_small_counts_are_told_as_0(counts: list[int], told: list[int]) -> None:
    given = torch.tensor(counts)
    assert suppressed(given, 5).tolist() == told
    assert given.tolist() == counts
    assert suppressed(given, 0).tolist() == suppressed(given, 1).tolist() == counts


@pytest.mark.parametrize(("floor", "least"), [(None, 5), ("0", 5), ("5", 5), ("12", 12)], ids=str)
def test_a_machine_raises_the_number_and_never_lowers_it(
    floor: str | None, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if floor is not None:
        monkeypatch.setenv(FLOOR, floor)
    assert Job(composed(), given=toy_task()).site.min_count == least


@pytest.mark.parametrize("floor", ["", "-1", "2.5", "few"])
def test_a_floor_that_is_no_number_is_refused(floor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FLOOR, floor)
    with pytest.raises(ConfigError, match=rf"{FLOOR}.*whole number >= 0"):
        _ = Job(composed(), given=toy_task()).site
