"""The guard on what tests cost names those that cost too much, and a slow machine runs fewer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import costs
import pytest
from house_rules.source import ROOT

LIMITS = """
import costs

costs.TEST = costs.OF_A_FILE = 0.5
costs.REFERENCE = 1e9  # so that the limits are the same on every machine
"""
PLANTED = """
import time
import pytest

def work(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

@pytest.fixture(scope="module")
def shared():
    work({seconds})

def test_dear(): work({seconds})

@pytest.mark.slow
def test_dear_and_marked(): work(1)

def test_cheap(shared): pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("seconds, fails", [(0.8, False), (1.3, True)])
def test_a_dear_test_and_a_dear_fixture_are_named(
    tmp_path: Path, seconds: float, fails: bool
) -> None:
    """The limit is .5 s here; the run fails from 1 s on."""
    file = tmp_path / "test_planted.py"
    file.write_text(PLANTED.format(seconds=seconds))
    (tmp_path / "conftest.py").write_text(LIMITS)
    command = [sys.executable, "-m", "pytest", "-p", "costs", "--costs=fail", str(file)]
    ended = subprocess.run(
        [*command, f"--rootdir={tmp_path}", "-c", str(ROOT / "pyproject.toml")],
        env={"PYTHONPATH": str(ROOT / "tests")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == fails, ended.stdout + ended.stderr
    named = [line for line in ended.stdout.splitlines() if ", at most " in line]
    assert len(named) == 2
    assert "test_dear takes" in named[0] and "fixtures shared by" in named[1]


MAKE = '#!/bin/sh\necho "$*" >> made\n'


@pytest.mark.parametrize("usual, slow", [("1e9", False), ("1e-9", True)])
def test_a_slow_machine_runs_a_third_of_the_slow_tests(
    tmp_path: Path, usual: str, slow: bool
) -> None:
    """With a `make` that only notes its arguments; what follows the tests finds no run, and fails.

    Args:
        tmp_path: a folder with copies of .ci/run and of what it calls.
        usual: what the fixed loop is said to take, in seconds.
        slow: whether the machine is slow then.
    """
    for folder in (".ci", "tests", ".venv/bin", "bin"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    source = (ROOT / "tests" / "costs.py").read_text()
    (tmp_path / "tests" / "costs.py").write_text(
        source.replace("REFERENCE = 0.048", f"REFERENCE = {usual}")
    )
    for name, text in {
        "bin/make": MAKE,
        "bin/git": "#!/bin/sh\necho 4f0c\n",
        ".venv/bin/python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    ended = subprocess.run(
        ["bash", str(tmp_path / ".ci" / "run")],
        env={**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    (asked,) = [line for line in (tmp_path / "made").read_text().splitlines() if "slow" in line]
    assert asked == f"test-slow ARGS={'--third=4f0c' if slow else ''}"
    told = [line for line in ended.stderr.splitlines() if "a third of make test-slow runs" in line]
    assert len(told) == slow


def test_commits_draw_whole_files_and_other_ones() -> None:
    every = [SimpleNamespace(nodeid=f"test_{n}.py::test_{end}") for n in range(20) for end in "ab"]
    drawn = []
    for commit in ("4f0c", "a1b2"):
        items, left = list(every), []
        config: Any = SimpleNamespace(
            getoption=lambda name, commit=commit: commit,
            hook=SimpleNamespace(pytest_deselected=lambda items, left=left: left.extend(items)),
        )
        costs.pytest_collection_modifyitems(config, items)  # type: ignore[arg-type]
        files = {item.nodeid.partition("::")[0] for item in items}
        assert len(files) == 7 and len(items) == 14
        assert [item for item in every if item in items] == items  # in their order
        assert len(left) == 26 and not [item for item in left if item in items]
        drawn.append(files)
    assert drawn[0] != drawn[1]


@pytest.mark.slow
def test_a_third_is_drawn_among_the_files_with_slow_tests(tmp_path: Path) -> None:
    """All processes of xdist draw the same."""
    (tmp_path / "conftest.py").write_text("")
    slow = "\n@pytest.mark.slow\ndef test_{}(): pass\n"
    for number in range(6):
        text = "import pytest\ndef test_quick(): pass\n" + slow.format("a") + slow.format("b")
        (tmp_path / f"test_{number}.py").write_text(text)
        (tmp_path / f"test_quick_{number}.py").write_text("def test_quick(): pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "costs", "-m", "slow", "--third=4f0c", "-v"]
    ended = subprocess.run(
        [*command, "-n2", "--dist=loadfile", f"--rootdir={tmp_path}", str(tmp_path)],
        env={"PYTHONPATH": str(ROOT / "tests")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    names = re.findall(r"PASSED (test_\d\.py)::test_([ab])", ended.stdout)
    files = {file for file, _ in names}
    assert len(files) == 2 and sorted(names) == [(f, end) for f in sorted(files) for end in "ab"]
