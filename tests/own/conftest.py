"""DynReg, a method in a package outside of the clone, installed; and the console script."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from fedhet.runs.config import composition
from fedhet.runs.config.composition import Bases

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the package in dynreg/."""
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path_factory.mktemp("source") / "dynreg"
    shutil.copytree(HERE / "dynreg", source, ignore=shutil.ignore_patterns("__pycache__"))
    code = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=True
    )
    return source / "dist" / process.stdout.splitlines()[-1]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of installed packages, for this process and those that it starts."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    inherited = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT), inherited]))
    return folder


@pytest.fixture
def installed(site: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package of dynreg/, installed: pip would unpack its wheel in the same way."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    forget(monkeypatch, "dynreg_outside")
    return site


def forget(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Let a package be imported anew, now and by the next test."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra composes each set of choices once: for tests that change no file after the first one.

    Values are set in a copy, as in sweeps; tests/config/test_bases.py compares it with Hydra.
    """
    monkeypatch.setattr(composition, "_hydra_config", Bases(composition._hydra_config))


@pytest.fixture
def console(tmp_path: Path) -> Command:
    """The console script `fedhet`: it does not put the working directory on sys.path."""
    script = tmp_path / "bin" / "fedhet"
    script.parent.mkdir()
    script.write_text("import sys\nfrom fedhet.__main__ import main\nsys.exit(main())\n")

    def run(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        path = os.environ.get("PYTHONPATH") or str(ROOT)
        return subprocess.run(
            [sys.executable, str(script), *arguments],
            cwd=cwd,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | environment,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run
