"""Fixtures of the data tests: an empty cache, and the real subsets where they are available."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cached partitions, which is empty."""
    monkeypatch.setenv("FEDHET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "partitions"


@pytest.fixture
def real() -> str:
    """The folder of the real subsets."""
    folder = Path(os.environ.get("FEDHET_TEST_DATA") or ROOT.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip("needs the real subsets: set FEDHET_TEST_DATA to their folder")
    return str(folder.resolve())
