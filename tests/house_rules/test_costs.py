"""The guard on what tests cost names those that cost too much."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
    work(1)

def test_dear(): work(1)

@pytest.mark.slow
def test_dear_and_marked(): work(1)

def test_cheap(shared): pass
"""


@pytest.mark.slow
def test_a_dear_test_and_a_dear_fixture_fail_by_name(tmp_path: Path) -> None:
    file = tmp_path / "test_planted.py"
    file.write_text(PLANTED)
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
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED, ended.stdout + ended.stderr
    named = [line for line in ended.stdout.splitlines() if ", at most " in line]
    assert len(named) == 2
    assert "test_dear takes" in named[0] and "fixtures shared by" in named[1]
