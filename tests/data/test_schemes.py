"""What each partition scheme promises: who has how many samples of which classes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from data.schemes import NAMES, OWNERS, counts, labels, make, natural, sizes

from fedhet.data.partition import Dirichlet, DrawnScheme, Iid, Pathological, Quantity, Shards

# ---- the samples that flwr-datasets gives

# Recorded from flwr-datasets 0.6.1 with numpy 2.4: scheme, data, seed, settings, Partition.hash.
# Its partitioners were called until every client had enough samples.
RECORDED = json.loads((Path(__file__).parent / "flwr_datasets_0.6.1.json").read_text("utf-8"))


@pytest.mark.parametrize("kind", [Iid, Dirichlet, Pathological, Shards, Quantity])
def test_clients_have_the_samples_that_flwr_datasets_gives(
    kind: type[DrawnScheme], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fedhet")
    rows = [row for row in RECORDED["rows"] if row[0] == kind.__name__]
    assert len(rows) >= 8
    for _, data, seed, keys, recorded in rows:
        sizes = RECORDED["class_sizes"][data]
        partition = make(kind, **{"min_size": 0, **keys}).assign(
            np.repeat(np.arange(len(sizes)), sizes), seed
        )
        assert partition.hash == recorded, (data, seed, keys)
    assert ("drawn" in caplog.text) == (kind in (Dirichlet, Pathological))  # again, for some rows


# ---- iid


def test_iid_parts_look_like_the_whole() -> None:
    y = labels(each=1000)
    held = counts(y, make(Iid).assign(y, seed=0))
    # 5 standard deviations of the hypergeometric draw
    assert np.abs(held - 100).max() < 50


# ---- pathological and shards


def test_pathological_deals_the_first_classes_in_turn() -> None:
    held = counts(labels(), make(Pathological, classes=1, clients=20).assign(labels(), seed=0))
    assert np.array_equal(held, np.tile(30 * np.eye(10, dtype=int), (2, 1)))


@pytest.mark.parametrize("k", [1, 2, 3, 10])
def test_pathological_gives_exactly_k_classes_in_equal_shares(k: int) -> None:
    y = labels()
    held = counts(y, make(Pathological, classes=k, clients=13).assign(y, seed=0))
    assert np.all((held > 0).sum(1) == k)
    assert np.all((held > 0).sum(0) >= 1)  # no class is left out
    for column in held.T:
        shares = column[column > 0]
        assert shares.max() - shares.min() <= 1


def test_shards_hold_consecutive_labels() -> None:
    y = labels(each=100)
    held = counts(y, make(Shards, shards=2).assign(y, seed=0))  # 20 shards of 50, two per class
    assert set(held.ravel()) <= {0, 50, 100} and np.all(held.sum(1) == 100)
    assert len({tuple(row) for row in held}) > 2


# ---- Dirichlet


def test_dirichlet_limits() -> None:
    y = labels(each=1000)
    even = counts(y, make(Dirichlet, alpha=1e6).assign(y, seed=0))
    assert np.abs(even - 100).max() <= 2  # rounding, and sd 1000 sqrt(.09 / 1e7) = 0.09
    skewed = counts(y, make(Dirichlet, alpha=1e-4, min_size=0).assign(y, seed=0))
    assert np.median(skewed.max(0)) > 990  # one client has nearly all of a class


@pytest.mark.parametrize(
    "alpha", [0.3, *(pytest.param(alpha, marks=pytest.mark.slow) for alpha in (1.0, 5.0))]
)
def test_dirichlet_shares_have_the_variance_of_the_distribution(alpha: float) -> None:
    y, clients = labels(classes=300, each=200), 10
    shares = counts(y, make(Dirichlet, alpha=alpha, min_size=0).assign(y, seed=0)) / 200
    assert np.allclose(shares.sum(0), 1)
    mean = 1 / clients
    assert shares.var() == pytest.approx(mean * (1 - mean) / (clients * alpha + 1), rel=0.12)


def test_dirichlet_is_drawn_again_until_all_have_enough(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fedhet")
    y = labels()
    partitions = [make(Dirichlet, alpha=0.1, min_size=8).assign(y, seed) for seed in range(5)]
    assert min(sizes(partition).min() for partition in partitions) >= 8
    assert "min_size=8 samples" in caplog.text


# ---- quantity skew


@pytest.mark.parametrize(
    ("kind", "share"),
    [("linear", lambda k: k), ("square", lambda k: k**2), ("exponential", np.exp)],
)
def test_quantity_sizes_follow_the_clients_number(
    kind: str, share: Callable[[np.ndarray], np.ndarray]
) -> None:
    y = labels(each=10_000)
    partition = make(Quantity, sizes=kind, clients=8).assign(y, seed=0)
    units = share(np.arange(1, 9))
    # rounded down; the last client gets the rest
    assert np.abs(sizes(partition) - len(y) * units / units.sum()).max() <= 8
    largest = np.bincount(y[partition.indices[-1]], minlength=10) / len(partition.indices[-1])
    assert np.abs(largest - 0.1).max() < 0.02  # labels do not differ: 7 standard deviations


@pytest.mark.parametrize("alpha", [0.5, 2.0])
def test_quantity_shares_have_the_variance_of_the_distribution(alpha: float) -> None:
    clients, n = 4, 1000
    scheme = make(Quantity, alpha=alpha, clients=clients)
    # only the sizes: 1,000 partitions would take seconds
    shares = np.array([scheme._drawn_sizes(n, seed) for seed in range(1000)]) / n
    mean = 1 / clients
    assert np.abs(shares.mean(0) - mean).max() < 0.03  # 4 standard deviations
    assert shares.var() == pytest.approx(mean * (1 - mean) / (clients * alpha + 1), rel=0.06)


def test_quantity_shares_out_what_min_size_leaves() -> None:
    y = labels(each=10)
    equal = make(Quantity, clients=10, min_size=10).assign(y, seed=0)
    assert sizes(equal).tolist() == [10] * 10
    tight = sizes(make(Quantity, clients=10, min_size=9, alpha=0.01).assign(y, seed=0))
    assert (tight.min(), tight.sum()) == (9, 100) and tight.max() > 15
    # no client is empty
    single = make(Quantity, clients=100, min_size=0, alpha=0.01).assign(y, seed=0)
    assert sizes(single).tolist() == [1] * 100


# ---- natural owners


def test_natural_clients_are_the_owners() -> None:
    partition = natural().assign(np.zeros(50), 0, OWNERS, NAMES)
    assert partition.owners == NAMES
    for owner, indices in enumerate(partition.indices):
        assert indices.tolist() == np.flatnonzero(owner == OWNERS).tolist()
    assert len(partition.indices) == 4
    # neither labels nor seed matter
    assert natural().assign(np.arange(50), 9, OWNERS, NAMES).hash == partition.hash
    large = natural(min_size=14).assign(np.zeros(50), 0, OWNERS, NAMES)
    assert large.owners == ("ben", "dora") and sizes(large).tolist() == [14, 30]


def test_natural_draws_a_number_of_owners() -> None:
    drawn = [natural(clients=2).assign(np.zeros(50), seed, OWNERS, NAMES) for seed in range(20)]
    for partition in drawn:
        assert list(partition.owners) == sorted(partition.owners)
        assert len(set(partition.owners)) == 2
        for owner, indices in zip(partition.owners, partition.indices, strict=True):
            assert indices.tolist() == np.flatnonzero(NAMES.index(owner) == OWNERS).tolist()
    assert {owner for partition in drawn for owner in partition.owners} == set(NAMES)
    assert natural(clients=2).assign(np.zeros(50), 3, OWNERS, NAMES).owners == drawn[3].owners
