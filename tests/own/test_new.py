"""`fedhet new`: what it writes works as it is written."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from own.conftest import ROOT, forget

from fedhet import __main__ as main
from fedhet.core.errors import ConfigError
from fedhet.runs.cli.new import KINDS, create
from fedhet.runs.config import compose


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project to which a piece of every kind was added."""
    folder = tmp_path_factory.mktemp("projects") / "my-pieces"
    for kind in KINDS:
        create(kind, f"some_{kind}", folder)
    return folder


def checked(project: Path, *command: str) -> str:
    """The output of a tool of this environment, which must find no fault."""
    environment = {
        "PYTHONPATH": os.pathsep.join([str(project), str(ROOT)]),
        "FEDHET_CONF": str(project / "my_pieces" / "conf"),
        "FEDHET_TRUST": "my_pieces",
        "MYPYPATH": os.pathsep.join([str(project), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=project,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def passed(output: str) -> int:
    """How many tests pytest says have passed."""
    return int((re.search(r"(\d+) passed", output) or ["", "0"])[1])


def test_ruff_has_nothing_to_say(project: Path) -> None:
    pytest.importorskip("ruff")
    checked(project, "ruff", "check", ".")
    checked(project, "ruff", "format", "--check", ".")


@pytest.mark.matrix
def test_mypy_has_nothing_to_say(project: Path) -> None:
    pytest.importorskip("mypy")
    checked(project, "mypy", "my_pieces", "tests")


@pytest.mark.slow
def test_the_tests_of_a_method_and_a_plugin_pass(project: Path) -> None:
    output = checked(project, "pytest", "-q", "-k", "(method or plugin) and not scaffold")
    assert passed(output)


@pytest.mark.matrix
def test_all_tests_pass_through_flower_too(project: Path) -> None:
    assert passed(checked(project, "pytest", "-q", "-m", "slow"))
    assert passed(checked(project, "pytest", "-q"))


FAULTS = [
    ("some_method.py", {"self.options.pull": "0.1"}, "fedavg"),
    (
        "some_method.py",
        {  # a memory that other processes do not have
            'state.get("v")': "vars(ctx.workspace).get(str(msg.pid))",
            'return Result(w), {"v": trees.pick(w, ctx.workspace.trained)}': (
                "setattr(ctx.workspace, str(msg.pid), trees.pick(w, ctx.workspace.trained))\n"
                "        return Result(w), state"
            ),
        },
        "wire",
    ),
    ("conf/method/some_method.yaml", {"pull: 0.1": "pull: 0.2"}, "options"),
]


@pytest.mark.matrix
@pytest.mark.parametrize(("file", "fault", "test"), FAULTS, ids=[test for _, _, test in FAULTS])
def test_the_tests_notice_a_fault(
    project: Path, tmp_path: Path, file: str, fault: dict[str, str], test: str
) -> None:
    copy = Path(shutil.copytree(project, tmp_path / "my-pieces"))
    path = copy / "my_pieces" / file
    text = path.read_text()
    for right, wrong in fault.items():
        assert text.count(right) == 1
        text = text.replace(right, wrong)
    path.write_text(text)
    with pytest.raises(AssertionError, match=rf"FAILED tests/test_some_method.py::test_\w*{test}"):
        checked(copy, "pytest", "-q", "-k", test, "tests/test_some_method.py")


def test_it_is_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.main(["new", "method", "Fed_New"]) == 0
    out = capsys.readouterr().out
    written = [line.removeprefix("written: ") for line in out.splitlines() if "written" in line]
    assert sorted(written) == [
        "fedhet-fed-new/fedhet_fed_new/__init__.py",
        "fedhet-fed-new/fedhet_fed_new/conf/method/fed_new.yaml",
        "fedhet-fed-new/fedhet_fed_new/fed_new.py",
        "fedhet-fed-new/pyproject.toml",
        "fedhet-fed-new/tests/test_fed_new.py",
    ]
    assert all(Path(path).is_file() for path in written)
    assert "pip install -e fedhet-fed-new pytest\n  python -m fedhet method=fed_new\n" in out
    forget(monkeypatch, "fedhet_fed_new")
    monkeypatch.syspath_prepend(tmp_path / "fedhet-fed-new")
    monkeypatch.setenv("FEDHET_TRUST", "fedhet_fed_new")
    monkeypatch.setenv("FEDHET_CONF", "fedhet-fed-new/fedhet_fed_new/conf")
    assert compose(["method=fed_new"]).cfg.method.pull == 0.1


@pytest.mark.parametrize(
    ("name", "cls"),
    [("FedExp", "FedExp"), ("fedexp", "Fedexp"), ("fed_exp", "FedExp"), ("FedBN2", "FedBN2")],
)
def test_the_class_has_the_capitals_that_are_written(tmp_path: Path, name: str, cls: str) -> None:
    written = create("method", name, tmp_path / "some-pieces")
    assert written[0].name == f"{name.lower()}.py"
    assert f"class {cls}(Method):" in written[0].read_text()
    assert f"some_pieces.{name.lower()}.{cls}" in written[1].read_text()


def test_a_new_project_is_installable(tmp_path: Path) -> None:
    """Its wheel has the yaml file and the entry point, and building it prints no warning."""
    pytest.importorskip("setuptools", minversion="77")
    project = tmp_path / "some-pieces"
    create("plugin", "mine", project)
    code = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"
    environment = {key: v for key, v in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=project, env=environment, capture_output=True, text=True
    )
    output = process.stdout + process.stderr
    assert process.returncode == 0 and "warning" not in output.lower(), output
    names = output  # setuptools lists what it adds
    assert "adding 'some_pieces/conf/plugin/mine.yaml'" in names
    points = project / "some_pieces.egg-info" / "entry_points.txt"
    assert points.read_text() == "[fedhet.conf]\nsome_pieces = some_pieces.conf\n"


@pytest.mark.parametrize(
    ("kind", "name", "project", "message"),
    [
        ("method", "1st", "new", "'1st' .*name .*method"),
        ("method", "Scaffold", "new", "method=scaffold "),
        ("model", "a-b", "new", "'a-b' .*name .*model"),
        ("method", "scaffold", "new", "method=scaffold "),
        ("method", "mine", "fedhet", "'fedhet' .*one"),
        ("method", "mine", "1st", "'1st' .*one"),
        ("method", "mine", "full", "full .*empty"),
        ("method", "mine", "other", r"other/pyproject.toml names .*package"),
        ("method", "mine", "broken", r"broken/pyproject.toml: Invalid"),
        ("plugin", "taken", "ours", r"taken.py: "),
    ],
)
def test_what_it_refuses(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    name: str,
    project: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("full", "other", "broken"):
        Path(folder).mkdir()
    Path("full", "notes.txt").touch()
    Path("other", "pyproject.toml").write_text('[project]\nname = "other"\n')
    Path("broken", "pyproject.toml").write_text("[")
    create("method", "taken", Path("ours"))
    before = sorted(Path().rglob("*"))
    with pytest.raises(ConfigError, match=message):
        create(kind, name, Path(project))
    assert sorted(Path().rglob("*")) == before
