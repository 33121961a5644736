"""The smallest number of samples of which a client sends a statistic, and who decides it."""

from __future__ import annotations

import itertools

import pytest
import torch
from composing import composed

from fedhet.core.counts import suppressed, withheld
from fedhet.core.errors import ConfigError
from fedhet.core.limits import FLOOR
from fedhet.data.toy import toy_task
from fedhet.flower.sites import OwnData
from fedhet.runs.job import Job


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ([4, 3, 9], [0, 0, 9]),
        ([5, 6, 9], [5, 6, 9]),
        ([0, 6, 9], [0, 6, 9]),  # it has none of that class: no sample is told of
        ([4, 0, 9], [0, 0, 0]),  # 4 = 13 - 9 would follow, since the class without samples has none
        ([1, 0, 50, 49], [0, 0, 50, 0]),
        ([3, 0, 7], [0, 0, 0]),
        ([1, 2, 50, 49], [0, 0, 50, 0]),  # 1 + 2 = 102 - 99: three samples of two classes
        ([1, 4, 50, 49], [0, 0, 50, 49]),
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


def test_what_is_not_told_is_no_count_of_few_samples_either() -> None:
    """The sum of what is withheld, the number of all samples minus what is told."""
    for counts in itertools.product(range(8), repeat=4):
        hidden = withheld(counts, 4)
        rest = sum(n for n, h in zip(counts, hidden, strict=True) if h)
        assert rest == 0 or rest >= 4 or rest == sum(counts), counts
        assert all(h for n, h in zip(counts, hidden, strict=True) if n < 4)
        if not any(0 < n < 4 for n in counts):
            assert hidden == [n == 0 for n in counts]  # no more than must be


@pytest.mark.parametrize(("floor", "least"), [(None, 5), ("0", 5), ("5", 5), ("12", 12)], ids=str)
def test_a_machine_raises_the_number_and_never_lowers_it(
    floor: str | None, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if floor is not None:
        monkeypatch.setenv(FLOOR, floor)
    assert Job(composed(), object_task=toy_task()).workspace.min_count == least


@pytest.mark.parametrize("floor", ["", "-17", "2.5", "canary-few"])
def test_a_floor_that_is_no_number_is_refused(floor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FLOOR, floor)
    with pytest.raises(ConfigError, match=rf"^{FLOOR} .*whole number >= 0$"):
        _ = Job(composed(), object_task=toy_task()).workspace


@pytest.mark.parametrize(
    ("run", "site", "machine", "least"),
    [(0, {}, "0", 5), (7, {}, "3", 7), (0, {"min-count": 9}, "3", 9), (0, {}, "20", 20)],
)
def test_a_run_raises_the_number_of_a_site_and_never_lowers_it(
    run: int, site: dict[str, int], machine: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FLOOR, machine)
    own = OwnData.of({"site": "a", "data": "/a.csv", **site})
    assert own
    job = Job(composed(f"privacy.min_count={run}"), object_task=toy_task(), limits=own.limits)
    assert job.workspace.min_count == least
