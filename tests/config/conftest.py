from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fedhet.config import catalogue, config


@pytest.fixture
def own_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of conf/ to which a test may add files."""
    folder = Path(shutil.copytree(catalogue.CONF, tmp_path / "conf"))
    monkeypatch.setattr(catalogue, "CONF", folder)
    monkeypatch.setattr(config, "CONF", folder)
    return folder
