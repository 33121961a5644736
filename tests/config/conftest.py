from __future__ import annotations

import runpy
import shutil
from pathlib import Path

import pytest
from fake_jobs import install_jobs

from fedhet.runs.config import Config, catalogue, composition
from fedhet.runs.config.composition import Bases

SCRIPT = Path(__file__).parents[2] / "scripts" / "bundle.py"


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The app as `make bundle` gives it to others."""
    folder = tmp_path_factory.mktemp("bundle") / "fedhet"
    runpy.run_path(str(SCRIPT))["write"](folder)
    return folder


@pytest.fixture
def own_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of conf/ to which a test may add files."""
    folder = Path(shutil.copytree(catalogue.CONF, tmp_path / "conf"))
    monkeypatch.setattr(catalogue, "CONF", folder)
    return folder


@pytest.fixture(scope="session")
def _bases() -> Bases:
    return Bases(composition._hydra_config)


@pytest.fixture
def read_once(_bases: Bases, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra composes each set of choices once: for tests that change no file.

    Values are set in a copy, as in sweeps; tests/config/test_bases.py compares it with Hydra.
    """
    monkeypatch.setattr(composition, "_hydra_config", _bases)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations that were run, by an engine that does nothing."""
    configs: list[Config] = []
    install_jobs(monkeypatch, configs, lambda settings: None)
    return configs
