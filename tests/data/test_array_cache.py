"""Decoded arrays on disk: decoded once, mapped without copies, replaced when damaged.

A cache that cannot be written is bypassed.
"""

from __future__ import annotations

import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from fedhet.data.array_cache import Arrays, cached_arrays, signature

ARRAYS = {
    "x": np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
    "names": np.array(["a", "bcd"]),
    "none": np.zeros((0, 5), np.float32),
}


def same(arrays: Arrays) -> bool:
    if list(arrays) != list(ARRAYS):
        return False
    return all(
        arrays[name].dtype == array.dtype and np.array_equal(arrays[name], array)
        for name, array in ARRAYS.items()
    )


def miss() -> Arrays:
    raise LookupError("a miss")


def entry(cache_dir: Path) -> Path:
    """The only entry of the cache."""
    (folder,) = (path for path in (cache_dir.parent / "data").iterdir() if path.is_dir())
    return folder


def test_arrays_are_made_once_and_mapped(cache_dir: Path) -> None:
    assert same(cached_arrays("toy", {"a": 1}, lambda: ARRAYS))
    again = cached_arrays("toy", {"a": 1}, miss)
    assert same(again)
    torch.from_numpy(again["x"])[0] = 99  # writable, as torch requires, and private
    assert same(cached_arrays("toy", {"a": 1}, miss))
    for name, key in (("other", {"a": 1}), ("toy", {"a": 2})):
        with pytest.raises(LookupError):
            cached_arrays(name, key, miss)


@pytest.mark.parametrize("damage", ["cut", "gone", "other shape", "no header", "empty header"])
def test_a_damaged_entry_is_replaced(
    cache_dir: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    cached_arrays("toy", {}, lambda: ARRAYS)
    place = entry(cache_dir)
    if damage == "cut":
        (place / "x.npy").write_bytes((place / "x.npy").read_bytes()[:-1])
    elif damage == "gone":
        (place / "x.npy").unlink()
    elif damage == "other shape":
        np.save(place / "x.npy", ARRAYS["x"][:1])
    else:
        (place / "header.json").write_text("{}" if damage == "no header" else "")
    assert same(cached_arrays("toy", {}, lambda: ARRAYS))
    assert f"{place} are damaged" in caplog.text
    # overwritten, and nothing else is left behind
    assert same(cached_arrays("toy", {}, miss)) and entry(cache_dir) == place


def test_concurrent_processes_decode_once() -> None:
    calls: list[int] = []

    def turn(i: int) -> Arrays:
        return cached_arrays("toy", {}, lambda: calls.append(i) or ARRAYS)

    with ThreadPoolExecutor(8) as pool:
        assert all(map(same, pool.map(turn, range(32))))
    assert len(calls) == 1


def test_unwritable_cache_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("FEDHET_CACHE", str(tmp_path / "file"))
    caplog.set_level(logging.INFO, "fedhet")
    for key in ({}, {"a": 1}):
        assert same(cached_arrays("toy", key, lambda: ARRAYS))
    assert len(caplog.records) == 1 and str(tmp_path / "file") in caplog.text


def test_a_full_disk_falls_back_to_memory(
    monkeypatch: pytest.MonkeyPatch, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    assert same(cached_arrays("toy", {}, lambda: ARRAYS))
    assert "No space left" in caplog.text
    assert [path.suffix for path in (cache_dir.parent / "data").iterdir()] == [".lock"]


def test_a_changed_source_file_has_another_signature(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("1")
    before = signature([path])
    assert before == json.loads(json.dumps(signature([path])))
    os.utime(path, ns=(0, 10))
    assert signature([path]) != before
