from __future__ import annotations

from collections.abc import Callable
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
