"""Partitions: what each scheme promises, repeatability, impossible settings."""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from fedhet.config.targets import instantiate
from fedhet.data.partition import Dirichlet, Iid, Natural, Pathological, Quantity, Shards
from fedhet.data.saved import Saved
from fedhet.data.scheme import Drawn, Partition
from fedhet.errors import ConfigError
from fedhet.streams import generator

CONF = Path(__file__).parents[2] / "conf" / "partition"
OPTIONS = {
    Iid: {},
    Dirichlet: {"alpha": 0.5},
    Pathological: {"classes": 2},
    Shards: {"shards": 2},
    Quantity: {"sizes": "dirichlet", "alpha": 0.5},
}
SCHEMES = list(OPTIONS)


def make(kind: type[Drawn], **keys: object) -> Drawn:
    return kind(
        **{
            "name": kind.__name__,
            "clients": 10,
            "min_size": 1,
            "split": [0.8, 0.1, 0.1],
            "noise": 0,
            **OPTIONS[kind],
            **keys,
        }
    )


def labels(classes: int = 10, each: int = 60) -> np.ndarray:
    """Sorted by class, as the files of an image folder come."""
    return np.repeat(np.arange(classes), each)


@pytest.mark.parametrize("kind", SCHEMES)
@pytest.mark.parametrize("clients", [1, 7, 10, 30])
def test_every_sample_has_one_owner(kind: type[Drawn], clients: int) -> None:
    y = labels(each=63)
    partition = make(kind, clients=clients).assign(y, seed=3)
    every = np.concatenate(partition.indices)
    assert len(partition.indices) == clients
    assert len(np.unique(every)) == len(every) and every.min() >= 0 and every.max() < len(y)
    assert all(part.dtype == np.int64 and np.all(np.diff(part) > 0) for part in partition.indices)
    held = np.unique(y[every])
    # shards are equal: the remainder is left out, less than one sample per shard
    if kind is Shards:
        assert len(every) == 2 * clients * (len(y) // (2 * clients))
    # pathological: with fewer clients than classes some classes have no holder, the others are
    # whole
    else:
        assert len(every) == 63 * len(held)
        assert len(held) == 10 or (kind is Pathological and clients < 10)


@pytest.mark.parametrize("kind", SCHEMES)
def test_repeatable_and_seeded(
    kind: type[Drawn], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    y, scheme = labels(), make(kind)
    first = scheme.assign(y, seed=1)
    monkeypatch.setenv("FEDHET_CACHE", str(tmp_path / "another"))
    np.random.seed(5)  # a global generator has no part in it
    again = scheme.assign(y.astype(np.uint8), seed=1)
    assert again == first and all(map(np.array_equal, again.indices, first.indices))
    assert scheme.assign(y, seed=2).hash != first.hash
    assert make(kind, clients=9).assign(y, seed=1).hash != first.hash


def test_hash_is_the_documented_one() -> None:
    indices = [np.array([0, 3]), np.array([], dtype=np.int64), np.array([1])]
    numbers = [2, 0, 3, 0, 1, 1]
    expected = hashlib.sha256(
        b"".join(number.to_bytes(8, "little") for number in numbers)
    ).hexdigest()[:16]
    assert Partition("toy", indices).hash == expected


@pytest.mark.parametrize("clients", [1, 3, 10, 60, 97])
def test_iid_cuts_as_flwr_datasets_does(clients: int) -> None:
    from datasets import Dataset
    from flwr_datasets.partitioner import IidPartitioner

    y = labels(each=10)
    theirs = IidPartitioner(clients)
    theirs.dataset = Dataset.from_dict(
        {"index": generator(4, "partition", "order").permutation(len(y))}
    )
    ours = make(Iid, clients=clients).assign(y, seed=4)
    for pid, indices in enumerate(ours.indices):
        assert indices.tolist() == sorted(theirs.load_partition(pid)["index"])


def test_iid_parts_look_like_the_whole() -> None:
    y = labels(each=1000)
    for indices in make(Iid).assign(y, seed=0).indices:
        # 5 standard deviations of the hypergeometric draw
        assert np.abs(np.bincount(y[indices], minlength=10) - 100).max() < 50


def counts(y: np.ndarray, partition: Partition) -> np.ndarray:
    return np.stack(
        [np.bincount(y[indices], minlength=y.max() + 1) for indices in partition.indices]
    )


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
    held = counts(y, make(Shards, shards=2).assign(y, seed=0))  # 20 shards of 50, two to a class
    assert set(held.ravel()) <= {0, 50, 100} and np.all(held.sum(1) == 100)
    assert len({tuple(row) for row in held}) > 2


def test_dirichlet_limits() -> None:
    y = labels(each=1000)
    even = counts(y, make(Dirichlet, alpha=1e6).assign(y, seed=0))
    assert np.abs(even - 100).max() <= 2  # rounding, and sd 1000 sqrt(.09 / 1e7) = 0.09
    skewed = counts(y, make(Dirichlet, alpha=1e-4, min_size=0).assign(y, seed=0))
    assert np.median(skewed.max(0)) > 990  # a class has one holder


@pytest.mark.parametrize("alpha", [0.3, 1.0, 5.0])
def test_dirichlet_shares_have_the_variance_of_the_distribution(alpha: float) -> None:
    y, clients = labels(classes=300, each=200), 10
    shares = counts(y, make(Dirichlet, alpha=alpha, min_size=0).assign(y, seed=0)) / 200
    assert np.allclose(shares.sum(0), 1)
    mean = 1 / clients
    assert shares.var() == pytest.approx(mean * (1 - mean) / (clients * alpha + 1), rel=0.12)


def test_dirichlet_is_drawn_again_until_all_have_enough(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fedhet")
    y = labels()
    tried = [make(Dirichlet, alpha=0.1, min_size=8).assign(y, seed) for seed in range(5)]
    assert min(len(indices) for partition in tried for indices in partition.indices) >= 8
    assert "flwr-datasets warned" in caplog.text


# ---- quantity skew


def sizes(partition: Partition) -> np.ndarray:
    return np.array(list(map(len, partition.indices)))


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
    # rounded down; the last gets what is left
    assert np.abs(sizes(partition) - len(y) * units / units.sum()).max() <= 8
    largest = np.bincount(y[partition.indices[-1]], minlength=10) / len(partition.indices[-1])
    assert np.abs(largest - 0.1).max() < 0.02  # labels do not differ: 7 standard deviations


@pytest.mark.parametrize("alpha", [0.5, 2.0])
def test_quantity_shares_have_the_variance_of_the_distribution(alpha: float) -> None:
    clients, n = 4, 1000
    scheme = make(Quantity, alpha=alpha, clients=clients)
    # a partition of each would take seconds
    shares = np.array([scheme._drawn_sizes(n, seed) for seed in range(1000)]) / n
    mean = 1 / clients
    assert np.abs(shares.mean(0) - mean).max() < 0.03  # 4 standard deviations
    assert shares.var() == pytest.approx(mean * (1 - mean) / (clients * alpha + 1), rel=0.06)


def test_quantity_shares_out_what_min_size_leaves() -> None:
    y = labels(each=10)
    assert sizes(make(Quantity, clients=10, min_size=10).assign(y, seed=0)).tolist() == [10] * 10
    tight = sizes(make(Quantity, clients=10, min_size=9, alpha=0.01).assign(y, seed=0))
    assert (tight.min(), tight.sum()) == (9, 100) and tight.max() > 15
    assert (
        sizes(make(Quantity, clients=100, min_size=0, alpha=0.01).assign(y, seed=0)).tolist()
        == [1] * 100
    )  # nobody is empty


# ---- natural owners

OWNERS = np.repeat([2, 0, 3, 1], [5, 1, 30, 14])[np.random.default_rng(0).permutation(50)]
NAMES = ("anna", "ben", "carla", "dora")


def natural(**keys: object) -> Natural:
    return Natural(
        **{
            "name": "natural",
            "clients": None,
            "min_size": 0,
            "split": [0.8, 0.1, 0.1],
            "noise": 0,
            **keys,
        }
    )


def test_natural_clients_are_the_owners() -> None:
    partition = natural().assign(np.zeros(50), 0, OWNERS, NAMES)
    assert partition.owners == NAMES
    assert [indices.tolist() for indices in partition.indices] == [
        np.flatnonzero(owner == OWNERS).tolist() for owner in range(4)
    ]
    # neither labels nor seed matter
    assert natural().assign(np.arange(50), 9, OWNERS, NAMES).hash == partition.hash
    large = natural(min_size=14).assign(np.zeros(50), 0, OWNERS, NAMES)
    assert large.owners == ("ben", "dora") and sizes(large).tolist() == [14, 30]


def test_natural_draws_so_many_owners() -> None:
    drawn = [natural(clients=2).assign(np.zeros(50), seed, OWNERS, NAMES) for seed in range(20)]
    for partition in drawn:
        assert (
            list(partition.owners) == sorted(partition.owners) and len(set(partition.owners)) == 2
        )
        for owner, indices in zip(partition.owners, partition.indices, strict=True):
            assert indices.tolist() == np.flatnonzero(NAMES.index(owner) == OWNERS).tolist()
    assert {owner for partition in drawn for owner in partition.owners} == set(NAMES)
    assert natural(clients=2).assign(np.zeros(50), 3, OWNERS, NAMES).owners == drawn[3].owners


def test_natural_refusals_have_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"partition=natural: .*femnist.*shakespeare.*chest_xray"):
        natural().assign(np.zeros(50), 0)
    with pytest.raises(
        ConfigError, match=r"partition\.clients=5 with partition\.min_size=0: 4 of 4 owners"
    ):
        natural(clients=5).assign(np.zeros(50), 0, OWNERS, NAMES)
    with pytest.raises(
        ConfigError, match=r"partition\.clients=3 with partition\.min_size=14: 2 of 4 owners"
    ):
        natural(clients=3, min_size=14).assign(np.zeros(50), 0, OWNERS, NAMES)
    with pytest.raises(ConfigError, match=r"^partition\.min_size=31: 0 of 4 owners"):
        natural(min_size=31).assign(np.zeros(50), 0, OWNERS, NAMES)


@pytest.mark.parametrize(
    ("kind", "keys", "message"),
    [
        (Iid, {"clients": 101, "min_size": 0}, "partition.clients=101: there are only 100 samples"),
        (
            Iid,
            {"clients": 10, "min_size": 11},
            "partition.min_size=11: 10 clients would need 110 samples, there are 100",
        ),
        (
            Dirichlet,
            {"clients": 20, "alpha": 0.01, "min_size": 3},
            "partition Dirichlet of 100 samples by .*'alpha': 0.01.* impossible",
        ),
        (Pathological, {"classes": 11}, "partition.classes=11: the data have only 10 classes"),
        (
            Pathological,
            {"classes": 9, "clients": 50},
            "partition Pathological of 100 samples .* impossible",
        ),
        (
            Pathological,
            {"classes": 1, "clients": 15, "min_size": 6},
            r"partition.min_size=6: .* some client would get 5 of 100",
        ),
        (
            Shards,
            {"shards": 11},
            "partition.shards=11: 10 clients would need 110 shards of 100 samples",
        ),
        (
            Quantity,
            {"sizes": "square"},
            (
                "partition Quantity of 100 samples .*'sizes': 'square'.* impossible: .* not greater"
                " than 0"
            ),
        ),
        (
            Quantity,
            {"sizes": "exponential", "clients": 100},
            "partition Quantity of 100 samples .* impossible",
        ),
        (
            Quantity,
            {"sizes": "linear", "min_size": 2},
            "partition.min_size=2: .* some client would get 1 of 100",
        ),
        (
            Shards,
            {"shards": 3, "clients": 6, "min_size": 16},
            "partition.min_size=16: .* some client would get 15 of 100",
        ),
    ],
)
def test_impossible_settings_are_refused_with_the_numbers(
    kind: type[Drawn], keys: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(kind, **keys).assign(labels(each=10), seed=0)


def test_a_sample_with_two_owners_is_noticed() -> None:
    class Twice(Drawn):
        def _draw(self, labels: np.ndarray, seed: int) -> list[np.ndarray]:
            return [np.array([0, 7]), np.array([1, 7])]

    with pytest.raises(RuntimeError, match="sample 7 has 2 owners"):
        Twice(name="twice", clients=2, min_size=1, split=[0.8, 0.1, 0.1], noise=0).assign(
            labels(), seed=0
        )


@pytest.mark.parametrize(
    ("kind", "key", "values"),
    [
        (Iid, "clients", [0, -1, 2.0, "10", True, None]),
        (Iid, "min_size", [-1, 0.5]),
        (
            Iid,
            "split",
            [
                [0.8, 0.2],
                [0.8, 0.1, 0.2],
                [0, 0.5, 0.5],
                [1.1, -0.1, 0],
                ["0.8", "0.1", "0.1"],
                0.8,
                "abc",
                [float("nan")] * 3,
            ],
        ),
        (Dirichlet, "alpha", [0, -0.1, float("inf"), float("nan"), "0.3", True]),
        (Pathological, "classes", [0, 1.5]),
        (Shards, "shards", [0, "2"]),
        (Quantity, "sizes", ["equal", None]),
        (Quantity, "alpha", [0, "1"]),
        (Iid, "noise", [-0.1, float("inf"), float("nan"), "0.1", True, None]),
        (Natural, "clients", [0, -1, 2.0, "10", True]),
    ],
)
def test_wrong_values_name_their_key(kind: type[Drawn], key: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=f"partition.{key}="):
            natural(**{key: value}) if kind is Natural else make(kind, **{key: value})


@pytest.mark.parametrize("name", [path.stem for path in CONF.glob("*.yaml")])
def test_yamls_make_the_schemes(name: str) -> None:
    conf = OmegaConf.load(CONF / f"{name}.yaml")
    kinds = {kind.__name__.lower(): kind for kind in (*SCHEMES, Natural)} | {
        "noise": Iid,
        "saved": Saved,
    }
    assert conf._target_ == f"{kinds[name].__module__}.{kinds[name].__name__}"
    if name == "saved":
        with pytest.raises(ConfigError, match=r"partition\.name=None: give a saved name"):
            instantiate(conf)
        return
    scheme = instantiate(conf)
    assert (scheme.name, scheme.min_size, scheme.split, scheme.noise) == (
        name,
        2,
        (0.8, 0.1, 0.1),
        0.1 if name == "noise" else 0,
    )
    owners, names = np.arange(600) % 10, tuple("abcdefghij")
    assert len(scheme.assign(labels(), 0, owners, names).indices) == 10


def test_checking_settings_imports_nothing_heavy() -> None:
    code = (
        "import sys; from fedhet.data import Dirichlet\n"
        "Dirichlet(name='d', clients=3, min_size=2, split=[.8, .1, .1], noise=.1, alpha=.3)\n"
        "print({'torch', 'datasets', 'flwr_datasets', 'flwr'} & set(sys.modules))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "set()"
    )


@pytest.mark.parametrize("kind", SCHEMES)
def test_ten_thousand_clients(kind: type[Drawn]) -> None:
    y = np.random.default_rng(0).permutation(labels(each=6000))
    start = time.perf_counter()
    partition = make(kind, clients=10_000, min_size=0).assign(y, seed=0)
    print(
        f"{kind.__name__}: 60,000 samples to 10,000 clients in {time.perf_counter() - start:.2f} s"
    )
    assert np.array_equal(np.sort(np.concatenate(partition.indices)), np.arange(60_000))
