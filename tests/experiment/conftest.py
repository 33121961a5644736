from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedhet.config import pieces


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Writes conf/experiment/<name>.yaml into a folder of one's own pieces."""
    folder = tmp_path / "own" / "experiment"
    folder.mkdir(parents=True)
    monkeypatch.setenv(pieces.SEARCH_PATH, str(folder.parent))

    def write(text: str, name: str = "mine") -> None:
        (folder / f"{name}.yaml").write_text(f"# @package _global_\n{text}\n")

    return write


@pytest.fixture
def own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore what `main` changes in its process, and run it in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)
