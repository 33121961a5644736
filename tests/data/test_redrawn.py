"""Schemes that are drawn again until every client has enough samples."""

from __future__ import annotations

import re

import numpy as np
import pytest
from data.schemes import labels, make, run_data, sizes

from fedhet.core.errors import ConfigError
from fedhet.data import partition
from fedhet.data.partition import Dirichlet, Pathological

MNIST = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


@pytest.mark.slow
def test_the_clients_of_fedlex_have_their_samples() -> None:
    y = np.repeat(np.arange(10), MNIST)
    for seed in range(3):  # eleven draws, as in flwr-datasets, do not do it for any of them
        drawn = make(Dirichlet, clients=100, alpha=0.05, min_size=2).assign(y, seed)
        assert sizes(drawn).min() >= 2 and sizes(drawn).sum() == 60_000


def test_a_run_with_few_samples_has_its_clients() -> None:
    settings = ("partition=dirichlet", "partition.clients=20", "partition.alpha=.05")
    for seed in range(10):
        data = run_data(*settings, "partition.min_size=5", f"seed={seed}")
        assert sizes(data.partition).min() >= 5 and sizes(data.partition).sum() == 1437


def test_pathological_is_drawn_again_where_a_class_is_too_small_for_its_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """flwr-datasets refuses such a draw whatever min_size is."""
    y = np.repeat(np.arange(10), [4, *[60] * 9])
    for seed in range(3):
        drawn = make(Pathological, clients=20, classes=2, min_size=0).assign(y, seed)
        assert all(len(np.unique(y[indices])) == 2 for indices in drawn.indices)
    y = np.repeat(np.arange(10), [1, *[60] * 9])  # clients 0 and 10 both have class 0
    monkeypatch.setattr(partition, "_MOST_CHOICES", 20 * 30 * 10 / 9)
    with pytest.raises(ConfigError, match=r"30 draws .*got 0 .*best"):
        make(Pathological, clients=20, classes=2).assign(y, 0)


@pytest.mark.parametrize(
    ("kind", "keys"), [(Dirichlet, {"alpha": 0.1}), (Pathological, {"classes": 3})]
)
def test_the_refusal_states_the_draws_and_the_best_that_they_gave(
    monkeypatch: pytest.MonkeyPatch, kind: type, keys: dict[str, object]
) -> None:
    monkeypatch.setattr(partition, "_MOST_DRAWS", 40)
    monkeypatch.setattr(partition, "_MOST_CHOICES", 20 * 40 * (10 / 9 + 10 / 8))
    y = labels(each=60)
    with pytest.raises(ConfigError, match=r"clients=20: .*none .*40 draws ") as caught:
        make(kind, clients=20, min_size=30, **keys).assign(y, 0)
    best = int(re.search(r"got (\d+) at best", str(caught.value))[1])
    assert 0 < best < 30
    reached = make(kind, clients=20, min_size=best, **keys).assign(y, 0)
    assert sizes(reached).min() == best
    with pytest.raises(ConfigError, match=f"min_size={best + 1} .*got {best} .*best"):
        make(kind, clients=20, min_size=best + 1, **keys).assign(y, 0)


def test_the_effort_is_bounded_by_the_settings_alone() -> None:
    def limit(kind: type, present: int, **keys: object) -> int:
        return make(kind, **keys)._draw_limit(present)

    assert limit(Dirichlet, 10, clients=100) == 50_000
    assert limit(Dirichlet, 10, clients=10_000) == 500
    assert limit(Dirichlet, 1000, clients=10_000) == 11  # never fewer than flwr-datasets
    assert limit(Pathological, 10, classes=1) == limit(Pathological, 10, classes=10) == 1
    assert limit(Pathological, 10, clients=100, classes=2) == 1800  # 200,000 / (100 * 10 / 9)
