"""Partitions of every scheme: no sample at two clients, repeatability, the hash, speed."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from data.schemes import SCHEMES, labels, make
from omegaconf import OmegaConf

from fedhet.core.errors import ConfigError
from fedhet.data.partition import DrawnScheme, Iid, Natural, Partition, Pathological, Saved, Shards
from fedhet.runs.config.instantiation import instantiate

CONF = Path(__file__).parents[2] / "conf" / "partition"


@pytest.mark.parametrize("kind", SCHEMES)
@pytest.mark.parametrize("clients", [1, 7, 30])
def test_every_sample_has_one_client(kind: type[DrawnScheme], clients: int) -> None:
    y = labels(each=63)
    partition = make(kind, clients=clients).assign(y, seed=3)
    every = np.concatenate(partition.indices)
    assert len(partition.indices) == clients
    assert len(np.unique(every)) == len(every) and every.min() >= 0 and every.max() < len(y)
    for indices in partition.indices:
        assert indices.dtype == np.int64 and np.all(np.diff(indices) > 0)
    held = np.unique(y[every])
    if kind is Shards:
        # shards are equal: the remainder is left out, less than one sample per shard
        assert len(every) == 2 * clients * (len(y) // (2 * clients))
    else:
        # pathological: with fewer clients than classes no client has some of the classes; the
        # others are assigned completely
        assert len(every) == 63 * len(held)
        assert len(held) == 10 or (kind is Pathological and clients < 10)


@pytest.mark.parametrize("kind", SCHEMES)
def test_repeatable_and_seeded(
    kind: type[DrawnScheme], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    y = labels()
    scheme = make(kind)
    first = scheme.assign(y, seed=1)
    monkeypatch.setenv("FEDHET_CACHE", str(tmp_path / "another"))
    np.random.seed(5)  # the global generator is not used
    again = scheme.assign(y.astype(np.uint8), seed=1)
    assert again == first and all(map(np.array_equal, again.indices, first.indices))
    assert scheme.assign(y, seed=2).hash != first.hash
    assert make(kind, clients=9).assign(y, seed=1).hash != first.hash


def test_hash_is_the_documented_one() -> None:
    indices = [np.array([0, 3]), np.array([], dtype=np.int64), np.array([1])]
    content = b"".join(number.to_bytes(8, "little") for number in [2, 0, 3, 0, 1, 1])
    assert Partition("toy", indices).hash == hashlib.sha256(content).hexdigest()[:16]


def test_a_sample_of_two_clients_is_noticed() -> None:
    class Twice(DrawnScheme):
        def draw(self, labels: np.ndarray, seed: int) -> list[np.ndarray]:
            return [np.array([0, 7]), np.array([1, 7])]

    scheme = Twice(name="twice", clients=2, min_size=1, split=[0.8, 0.1, 0.1], noise=0)
    with pytest.raises(RuntimeError, match=r"sample 7 .*assigned .*2 clients"):
        scheme.assign(labels(), seed=0)


# `sites`, which is no scheme for one data set, comes with dataset=local.
@pytest.mark.parametrize("name", sorted({path.stem for path in CONF.glob("*.yaml")} - {"sites"}))
def test_yamls_make_the_schemes(name: str) -> None:
    conf = OmegaConf.load(CONF / f"{name}.yaml")
    kinds = {kind.__name__.lower(): kind for kind in (*SCHEMES, Natural)}
    kind = {**kinds, "noise": Iid, "saved": Saved}[name]
    assert conf._target_ == f"{kind.__module__}.{kind.__name__}"
    if name == "saved":
        with pytest.raises(ConfigError, match=r"partition\.name=null "):
            instantiate(conf)
        return
    scheme = instantiate(conf)
    assert (scheme.name, scheme.min_size, scheme.split) == (name, 2, (0.8, 0.1, 0.1))
    assert scheme.noise == (0.1 if name == "noise" else 0)
    owners, names = np.arange(600) % 10, tuple("abcdefghij")
    assert len(scheme.assign(labels(), 0, owners, names).indices) == 10


def test_checking_settings_imports_nothing_heavy() -> None:
    code = (
        "import sys; from fedhet.data.partition import Dirichlet\n"
        "Dirichlet(name='d', clients=3, min_size=2, split=[.8, .1, .1], noise=.1, alpha=.3)\n"
        "print({'torch', 'datasets', 'flwr'} & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"


@pytest.mark.slow
@pytest.mark.parametrize("kind", SCHEMES)
def test_ten_thousand_clients(kind: type[DrawnScheme]) -> None:
    y = np.random.default_rng(0).permutation(labels(each=6000))
    start = time.perf_counter()
    partition = make(kind, clients=10_000, min_size=0).assign(y, seed=0)
    seconds = time.perf_counter() - start
    print(f"{kind.__name__}: 60,000 samples to 10,000 clients in {seconds:.2f} s")
    assert np.array_equal(np.sort(np.concatenate(partition.indices)), np.arange(60_000))
