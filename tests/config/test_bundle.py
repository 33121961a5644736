"""The Flower app bundle: what `make bundle` makes can be published, installed and run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
from contextlib import suppress
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from config.wheels import stub_wheels
from flwr.cli.app_cmd.publish import _collect_file_paths, _validate_files
from flwr.cli.build import build_fab_from_disk
from flwr.supercore.constant import MAX_FILE_COUNT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def dependencies(app: Path) -> list[str]:
    lines = tomllib.loads((app / "pyproject.toml").read_text())["project"]["dependencies"]
    return [str(line) for line in lines]


def test_flowers_checks_before_publishing_pass_with_room(bundle: Path) -> None:
    assert build_fab_from_disk(bundle)
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


def test_a_bundle_states_what_a_run_needs_and_no_more(bundle: Path) -> None:
    content = tomllib.loads((bundle / "pyproject.toml").read_text())
    assert set(content["tool"]) == {"hatch", "flwr"}
    assert "optional-dependencies" not in content["project"]
    left_out = set(dependencies(ROOT)) - set(dependencies(bundle))
    assert [line.partition(">")[0] for line in left_out] == ["ray"]


@pytest.mark.slow
def test_a_superlink_installs_every_dependency(bundle: Path, tmp_path: Path) -> None:
    """By Flower's own function, from an index without contents."""
    versions = stub_wheels(tmp_path / "wheels", dependencies(bundle))
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    env |= {
        "FLWR_HOME": str(tmp_path),
        "UV_CACHE_DIR": str(tmp_path / "cache"),
        "UV_FIND_LINKS": str(tmp_path / "wheels"),
        "UV_NO_INDEX": "1",
        "UV_OFFLINE": "1",
    }
    install = "from flwr.supercore.superexec.dependency_installer import install_app_dependencies"
    code = f"{install}\ninstall_app_dependencies({str(bundle)!r}, run_id=1)"
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
    installed = {path.name for path in (tmp_path / "runtime-envs" / "1").rglob("*.dist-info")}
    names = [canonicalize_name(Requirement(line).name) for line in dependencies(bundle)]
    missing = [
        name
        for name in names
        if f"{name.replace('-', '_')}-{versions[name]}.dist-info" not in installed
    ]
    assert missing == ["flwr"]  # the one that runs


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
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if path.suffix != ".pth" and "fedhet" not in path.name:  # which may be there as editable
            with suppress(FileExistsError):
                (packages / path.name).symlink_to(path)
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
    assert len(stated) == len(dependencies(bundle))
