"""Building fedhet prints no warnings, and what is installed is complete."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk
from ports import free_ports

from fedhet.engines.flwr import SUPERLINK
from fedhet.runs.flower_commands import flower_environment
from fedhet.runs.guard import TemporaryFolder

pytest.importorskip("hatchling")

ROOT = Path(__file__).parents[2]
HOSPITALS = {f"fedhet/data/heart_disease/{name}" for name in ("hospitals.json", "README.md")}
SOURCES = ("pyproject.toml", "README.md", "LICENSE")


def paths(folder: str, pattern: str) -> set[str]:
    return {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob(pattern)}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads: it leaves files beside its sources."""
    folder = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        shutil.copy(ROOT / name, folder)
    for name in ("fedhet", "conf"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def build(source: Path, kind: str) -> Path:
    """Build a distribution by the hook that pip calls, and check that it prints no warning."""
    code = f"from hatchling import build; print(build.build_{kind}('dist'))"
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=source, env=env, capture_output=True, text=True
    )
    output = process.stdout + process.stderr
    assert process.returncode == 0, output
    assert "warning" not in output.lower() and "!!" not in output, output
    return source / "dist" / process.stdout.splitlines()[-1]


def test_a_wheel_has_every_module_and_conf(source: Path) -> None:
    with zipfile.ZipFile(build(source, "wheel")) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    conf = {f"fedhet/{path}" for path in paths("conf", "*.yaml")}
    templates = paths("fedhet", "*.yaml")
    modules = paths("fedhet", "*.py")
    assert names == modules | conf | templates | HOSPITALS | {"fedhet/py.typed"}


@pytest.mark.slow
def test_the_app_of_flower_has_all_that_the_wheel_has(source: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(ROOT))) as bundle:
        names = {name for name in bundle.namelist() if name.startswith(("fedhet/", "conf/"))}
    every = [*(paths("fedhet", f"*.{kind}") for kind in ("py", "yaml")), paths("conf", "*.yaml")]
    assert names == HOSPITALS.union(*every)


@pytest.mark.slow
def test_the_conf_of_an_installed_wheel_is_found(source: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(build(source, "wheel")) as wheel:
        wheel.extractall(tmp_path)
    process = subprocess.run(
        [sys.executable, "-m", "fedhet", "--cfg", "job", "method=scaffold"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "_target_: fedhet.methods.scaffold.Scaffold" in process.stdout
    code = "from fedhet.runs.config.catalogue import CONF; print(CONF)"
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == str(tmp_path.resolve() / "fedhet" / "conf")


@pytest.mark.slow
def test_an_editable_install_uses_conf_in_place(source: Path) -> None:
    with zipfile.ZipFile(build(source, "editable")) as wheel:
        files = {name: wheel.read(name).decode() for name in wheel.namelist()}
    links = [text.strip() for name, text in files.items() if name.endswith(".pth")]
    assert links == [str(source)]
    assert not any(name.endswith((".py", ".yaml")) for name in files)


def test_the_papers_are_installed_in_place(source: Path) -> None:
    (source / "papers").mkdir()
    shutil.copy(ROOT / "papers" / "pyproject.toml", source / "papers")
    with zipfile.ZipFile(build(source / "papers", "editable")) as wheel:
        files = {name.rpartition("/")[2]: wheel.read(name).decode() for name in wheel.namelist()}
    assert [text.strip() for name, text in files.items() if name.endswith(".pth")] == [str(source)]
    lines = files["entry_points.txt"].splitlines()
    named = [line.partition(" = ")[2] for line in lines if "=" in line]
    assert sorted(named) == ["papers.command", "papers.conf"]


@pytest.mark.slow
def test_a_source_distribution_has_conf(source: Path) -> None:
    archive = build(source, "sdist")
    shutil.unpack_archive(archive, source / "unpacked")
    (folder,) = (source / "unpacked").iterdir()
    for tree in ("conf", "fedhet"):
        unpacked = (folder / tree).rglob("*.yaml")
        assert {path.relative_to(folder).as_posix() for path in unpacked} == paths(tree, "*.yaml")
    assert all((folder / name).exists() for name in HOSPITALS)
    assert all((folder / name).exists() for name in SOURCES)


@pytest.mark.matrix
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["wheel", "bundle"])
def test_an_empty_environment_is_enough(
    kind: str, source: Path, bundle: Path, tmp_path: Path
) -> None:
    """pip brings all that a run and its report need; `make test-installed` runs this alone."""
    installed = build(source, "wheel") if kind == "wheel" else bundle
    venv.create(tmp_path / "env", with_pip=True)
    programs = tmp_path / "env" / "bin"
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}

    def printed(program: str, *arguments: str) -> str:
        command = [str(programs / program), *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True, check=True
        ).stdout

    printed("pip", "install", "--quiet", str(installed))
    printed("pip", "check")
    where = printed("python", "-c", "import fedhet; print(fedhet.__file__)")
    assert Path(where.strip()).is_relative_to(tmp_path / "env")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert printed("fedhet", "--version").split()[1] == project["version"]
    printed("fedhet", "method=scaffold", "plugin=[fednorm]", "rounds=2", "hydra.run.dir=run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "ok"
    printed("fedhet", "report", "run")
    assert list((tmp_path / "run").rglob("*.html"))


@pytest.mark.matrix
@pytest.mark.timeout(1800)
def test_a_superlink_that_knows_nothing_of_fedhet_runs_the_bundle(
    bundle: Path, tmp_path: Path
) -> None:
    """Flower has uv install the dependencies from the package index."""
    venv.create(tmp_path / "env", with_pip=True)
    programs = tmp_path / "env" / "bin"
    project = tomllib.loads((bundle / "pyproject.toml").read_text())["project"]
    (flower,) = (line for line in project["dependencies"] if line.startswith("flwr>"))
    simulation = flower.replace("flwr", "flwr[simulation]")
    subprocess.run([programs / "pip", "install", "--quiet", simulation], check=True)
    http, control = free_ports(2)
    temporary = TemporaryFolder("fedhet-flwr-")
    with temporary as home:
        (Path(home) / "config.toml").write_text(SUPERLINK)
        env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        env |= {
            **flower_environment(Path(home)),
            **temporary.environment,
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(http),
            "FLWR_LOCAL_CONTROL_API_PORT": str(control),
            "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
        }
        lines = f"overrides='method=scaffold rounds=2 hydra.run.dir={tmp_path / 'run'}'"
        command = [programs / "flwr", "run", bundle, "local", "--stream", "--run-config", lines]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        temporary.end_processes()
    # Not what Flower says of it: on a busy disk "failed", see "Through Flower" in docs/running.md.
    log = done.stdout + done.stderr
    assert (tmp_path / "run" / "summary.json").exists(), log[-3000:]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "ok"
    assert "torch==" in log  # among what was installed
