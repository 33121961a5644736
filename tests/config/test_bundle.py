"""The Flower app bundle: what `flwr build` makes can be published, installed and run."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from flwr.cli.app_cmd.publish import _collect_file_paths, _validate_files
from flwr.cli.build import build_fab_from_disk
from flwr.supercore.constant import MAX_FILE_COUNT

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked bundle, as whoever installs the app gets it."""
    folder = tmp_path_factory.mktemp("bundle") / "fedhet"
    zipfile.ZipFile(io.BytesIO(build_fab_from_disk(ROOT))).extractall(folder)
    return folder


def test_flowers_checks_before_publishing_pass_with_room(bundle: Path) -> None:
    files = _collect_file_paths(bundle)
    _validate_files(files)
    assert len(files) < MAX_FILE_COUNT * 0.6
    assert bundle / "LICENSE" in files


def test_a_bundle_has_all_that_fedhet_reads(bundle: Path) -> None:
    """Flower leaves out every file whose name has another ending than those it knows."""
    tracked = subprocess.run(
        ["git", "ls-files", "fedhet", "conf"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert [name for name in tracked if not (bundle / name).is_file()] == ["fedhet/py.typed"]


@pytest.mark.slow
def test_an_unpacked_bundle_can_be_installed_and_run(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an environment that has the dependencies, and no fedhet."""
    venv.create(tmp_path / "env", symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    packages = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    target = ["--target", str(packages), "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([sys.executable, "-m", "pip", "install", *target, str(bundle)], check=True)
    # A folder named in a .pth file is searched, and its own .pth files, such as that of an editable
    # fedhet, are not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    command = [python, "-m", "fedhet", "rounds=1", f"hydra.run.dir={tmp_path}/run", "figures=false"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "ok"
    where = subprocess.run(
        [python, "-c", "import fedhet; print(fedhet.__file__)"],
        cwd=tmp_path, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert Path(where.strip()).is_relative_to(packages)
    (info,) = packages.glob("fedhet-*.dist-info")
    stated = [line for line in Distribution.at(info).requires or [] if "extra ==" not in line]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert len(stated) == len(project["dependencies"])
