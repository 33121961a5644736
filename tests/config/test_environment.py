"""Starts that go wrong: another Python, another folder, and readers that leave."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def bare(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python without any installed package, fedhet itself included."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-S", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    "arguments",
    ["-m fedhet", "-m fedhet --help", "-m fedhet data describe"],
)
def test_without_the_environment_one_line_says_how_to_get_it(arguments: str) -> None:
    process = bare(ROOT, *arguments.split())
    assert process.returncode == 1
    (line,) = process.stderr.splitlines()
    assert re.match(rf"error: \w+ is not installed in {re.escape(sys.executable)}: ", line)
    assert "`source .venv/bin/activate`, after `make run`" in line
    assert "`pip install -e .`" in line


def test_in_the_folder_around_the_clone_the_installed_package_is_found(tmp_path: Path) -> None:
    """There `fedhet` is the clone, too, which holds the package."""
    (tmp_path / "fedhet").symlink_to(ROOT)
    process = subprocess.run(
        [sys.executable, "-m", "fedhet", "--help"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "usage" in process.stdout


def piped(folder: Path, arguments: list[str], reader: str) -> subprocess.CompletedProcess[str]:
    """Python, whose output goes to the reader; the exit code is Python's."""
    command = shlex.join([sys.executable, *arguments])
    return subprocess.run(
        ["bash", "-c", f"{command} | {reader} > /dev/null; exit ${{PIPESTATUS[0]}}"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


# Runs without torch: each prints a line when it is complete, as real ones do.
RUNS = """
import sys
from pathlib import Path
from types import SimpleNamespace
import fedhet.runs.record
from fedhet.__main__ import main

def run_job(settings):
    folder = Path(settings.run_dir)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").touch()
    (folder / "summary.json").write_text("{}")
    print("trained", flush=True)
    return SimpleNamespace(summary={}, dir=folder)

sys.modules["fedhet.engines.dispatch"] = SimpleNamespace(run_job=run_job)
fedhet.runs.record.terminal = SimpleNamespace(log_to_stderr=lambda name: None)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("arguments", "reader"),
    [
        (["-m", "fedhet", "--help", "method=fedlex", "plugin=[feddisk]"], "head -1"),
        pytest.param(["-c", RUNS, "seed=0"], "true", marks=pytest.mark.slow),
        (["-c", RUNS, "-m", "seed=0,1"], "head -1"),
    ],
    ids=["help", "run", "sweep"],
)
def test_a_reader_may_leave(tmp_path: Path, arguments: list[str], reader: str) -> None:
    process = piped(tmp_path, arguments, reader)
    told = [line for line in process.stderr.splitlines() if not line.startswith("[")]
    assert (process.returncode, told) == (0, [])
    runs = len(list(tmp_path.rglob("model.safetensors")))
    assert runs == (2 if "seed=0,1" in arguments else int("seed=0" in arguments))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "reader"),
    [
        ("--list", "head -1"),
        ("data describe", "head -1"),
        ("method=fedavg rounds=1 client.steps=1", "true"),
        ("-m method=fedavg rounds=1 client.steps=1 seed=0,1", "head -1"),
    ],
)
def test_a_reader_that_leaves_is_no_error(tmp_path: Path, arguments: str, reader: str) -> None:
    """The program's exit code is 0, and it prints nothing about it; a sweep goes on."""
    process = piped(tmp_path, ["-m", "fedhet", *arguments.split()], reader)
    assert process.returncode == 0, process.stderr
    progress = [
        line for line in process.stderr.splitlines() if not line.startswith(("train 1, ", "["))
    ]
    assert progress == []
    runs = len(list(tmp_path.rglob("model.safetensors")))
    assert runs == (2 if arguments.startswith("-m") else int("rounds" in arguments))
