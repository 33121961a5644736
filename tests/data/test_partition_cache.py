"""The partitions' cache: identical hits, damaged files, and a folder that cannot be written."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from fedhet.data.partition import Iid

LABELS = np.arange(40) % 4


def scheme(**keys: object) -> Iid:
    defaults = {"name": "iid", "clients": 4, "min_size": 0, "split": [0.8, 0.1, 0.1], "noise": 0}
    return Iid(**{**defaults, **keys})


def same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return len(a) == len(b) and all(
        x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(a, b, strict=True)
    )


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


def files(cache_dir: Path) -> list[Path]:
    """The files of the only cached partition."""
    (entry,) = (path for path in (cache_dir.parent / "data").iterdir() if path.is_dir())
    return sorted(entry.iterdir())


@pytest.mark.parametrize("content", [b"", b"nonsense", "cut", "other"])
def test_a_damaged_file_is_replaced(
    cache_dir: Path, caplog: pytest.LogCaptureFixture, content: bytes | str
) -> None:
    first = scheme().assign(LABELS, seed=0)
    (path,) = (file for file in files(cache_dir) if file.name == "indices.npy")
    whole = path.read_bytes()
    if content == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    elif content == "other":  # with its samples in another order
        np.save(path, np.load(path)[::-1])
    else:
        path.write_bytes(content)  # type: ignore[arg-type]
    again = scheme().assign(LABELS, seed=0)
    assert same(again.indices, first.indices) and again.hash == first.hash
    assert f"{path.parent} " in caplog.text
    assert path.read_bytes() == whole  # overwritten


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 17])
def test_no_flipped_byte_passes(cache_dir: Path, step: int) -> None:
    first = scheme().assign(LABELS, seed=0)
    for path in files(cache_dir):
        whole = path.read_bytes()
        for position in range(0, len(whole), step):
            flipped = whole[position] ^ (0x01, 0xFF)[position % 2]
            path.write_bytes(whole[:position] + bytes([flipped]) + whole[position + 1 :])
            assert same(scheme().assign(LABELS, seed=0).indices, first.indices)
            path.write_bytes(whole)


def test_unwritable_folder_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("FEDHET_CACHE", str(tmp_path / "file"))
    caplog.set_level(logging.INFO, "fedhet")
    partitions = [scheme().assign(LABELS, seed) for seed in (0, 0, 1)]
    assert partitions[0] == partitions[1] != partitions[2]
    assert len(caplog.records) == 1 and str(tmp_path / "file") in caplog.text
