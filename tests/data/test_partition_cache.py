"""The partitions' cache: identical hits, damaged files, and a folder that cannot be written."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from fedhet.data import partition_cache
from fedhet.data.partition import Iid

LABELS = np.arange(40) % 4
INDICES = [np.array([4, 1, 2]), np.array([], dtype=np.int64), np.array([0])]


def scheme(**keys: object) -> Iid:
    defaults = {"name": "iid", "clients": 4, "min_size": 0, "split": [0.8, 0.1, 0.1], "noise": 0}
    return Iid(**{**defaults, **keys})


def same(a: list[np.ndarray] | None, b: list[np.ndarray]) -> bool:
    if a is None or len(a) != len(b):
        return False
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_hit_is_identical_and_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first = scheme().assign(LABELS, seed=0)

    def draw(*_: object) -> None:
        raise LookupError("a miss")

    monkeypatch.setattr(Iid, "draw", draw)
    # neither name, split nor noise changes which client has which samples
    hit = scheme(name="renamed", split=[1, 0, 0], noise=1).assign(LABELS, seed=0)
    assert hit.hash == first.hash and same(hit.indices, first.indices)
    for other, labels, seed in (
        (scheme(), LABELS, 1),
        (scheme(), LABELS[::-1], 0),
        (scheme(clients=5), LABELS, 0),
    ):
        with pytest.raises(LookupError):
            other.assign(labels, seed)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"nonsense", "cut", "npy", "other"])
def test_a_damaged_file_is_replaced(
    cache_dir: Path, caplog: pytest.LogCaptureFixture, content: bytes | str
) -> None:
    first = scheme().assign(LABELS, seed=0)
    (path,) = cache_dir.iterdir()
    whole = path.read_bytes()
    if content == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    elif content == "npy":
        with path.open("wb") as file:
            np.save(file, np.arange(3))
    elif content == "other":  # a good npz, with its samples in another order
        fields = dict(np.load(path))
        fields["indices"] = fields["indices"][::-1]
        np.savez(path, **fields)
    else:
        path.write_bytes(content)  # type: ignore[arg-type]
    again = scheme().assign(LABELS, seed=0)
    assert same(again.indices, first.indices) and again.hash == first.hash
    assert f"{path} is damaged" in caplog.text
    # overwritten, and nothing else is left behind
    assert [entry.name for entry in cache_dir.iterdir()] == [path.name]
    assert same(partition_cache.load(path.stem), first.indices)


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_no_flipped_byte_passes(cache_dir: Path, step: int) -> None:
    partition_cache.save("key", INDICES)
    assert same(partition_cache.load("key"), INDICES)
    path = cache_dir / "key.npz"
    whole = path.read_bytes()
    for position in range(0, len(whole), step):
        flipped = whole[position] ^ (0x01, 0xFF)[position % 2]
        path.write_bytes(whole[:position] + bytes([flipped]) + whole[position + 1 :])
        loaded = partition_cache.load("key")
        # some bytes of a zip, such as dates, do not matter
        assert loaded is None or same(loaded, INDICES)


def test_concurrent_saves_and_loads() -> None:
    def turn(i: int) -> list[np.ndarray] | None:
        partition_cache.save("key", INDICES)
        return partition_cache.load("key")

    with ThreadPoolExecutor(8) as pool:
        assert all(same(loaded, INDICES) for loaded in pool.map(turn, range(64)))


def test_unwritable_folder_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("FEDHET_CACHE", str(tmp_path / "file"))
    caplog.set_level(logging.INFO, "fedhet")
    partitions = [scheme().assign(LABELS, seed) for seed in (0, 0, 1)]
    assert partitions[0] == partitions[1] != partitions[2]
    assert len(caplog.records) == 1 and str(tmp_path / "file") in caplog.text


def test_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEDHET_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert partition_cache.folder() == tmp_path / ".cache" / "fedhet" / "partitions"
