"""What a run prints when clients fail: each cause once, and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SHORT = ["rounds=2", "partition.clients=4", "client.epochs=1", "eval.clients=false"]


def failing_run(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """A run in which client 3 fails in step 2."""
    faulty = ["plugin.fednorm._target_=faulty.Faulty", "plugin.fednorm.z_when=raise"]
    paths = os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parent)])
    return subprocess.run(
        [sys.executable, "-m", "fedhet", *SHORT, *faulty, *overrides, f"hydra.run.dir={folder}"],
        env=os.environ | {"FEDHET_TRUST": "faulty", "PYTHONPATH": paths},
        cwd=folder.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_that_stops_prints_the_reason_once(tmp_path: Path, workers: int) -> None:
    """The other worker may be about to reply, or about to receive its next message."""
    process = failing_run(tmp_path / "run", f"engine.workers={workers}")
    assert process.returncode == 1
    lines = process.stderr.splitlines()
    assert lines[0].startswith("train 1, ")
    assert lines[1:] == [
        "error: client 3 failed in phase 'train', step 2: OSError: the disk is full"
    ]
    assert "disk" not in process.stdout


def test_a_client_that_is_left_out_is_named_once(tmp_path: Path) -> None:
    process = failing_run(tmp_path / "run", "on_failure=skip", "replies.max_lost=1")
    assert process.returncode == 0, process.stderr
    assert process.stderr.count("the disk is full") == 1
    assert "1 client failed" in process.stderr
    assert "disk" not in process.stdout


def test_where_every_client_fails_each_is_named_once(tmp_path: Path) -> None:
    """Here the weights of all of them diverge."""
    process = failing_run(tmp_path / "run", "on_failure=skip", "client.lr=1e30")
    assert process.returncode == 1
    for client in range(4):
        assert process.stderr.count(f"client {client} failed") == 1
    assert process.stderr.startswith("error: client ")


def test_an_author_can_see_where_a_client_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDHET_TRACEBACK", "1")
    process = failing_run(tmp_path / "run", "engine.workers=2")
    assert process.returncode == 1
    assert f'{Path(__file__).with_name("faulty.py")}", line' in process.stderr
