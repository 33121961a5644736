"""What a run prints when clients fail: each cause once, and no traceback."""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedhet import __main__ as main

HERE = Path(__file__).parent
FAULTY = [
    "rounds=2",
    "partition.clients=4",
    "client.epochs=1",
    "eval.clients=false",
    "model.hidden=[8]",
    "figures=false",
    "plugin.fednorm._target_=faulty.Faulty",
    "plugin.fednorm.z_when=raise",
]
REASON = "error: client 3 failed in phase 'train', step 2: OSError: the disk is full"
REASON += "; on_failure=skip continues without it"
Printed = tuple[int, str, str]


@pytest.fixture
def failing_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    own_process: None,
) -> Callable[..., Printed]:
    """Runs the command line here, and its workers; client 3 fails in step 2.

    It returns the exit code, and what was printed to stdout and stderr.
    """
    monkeypatch.setenv("FEDHET_TRUST", "faulty")
    monkeypatch.syspath_prepend(str(HERE))

    def run(*overrides: str) -> Printed:
        with monkeypatch.context() as patch:
            for name in (None, "fedhet", "fedhet.data"):  # pytest's, or an earlier test's
                patch.setattr(logging.getLogger(name), "handlers", [])
            code = main.main([*FAULTY, *overrides, f"hydra.run.dir={tmp_path / 'run'}"])
        out, err = capfd.readouterr()
        assert not multiprocessing.active_children()
        return code, out, err

    return run


def check_reason(code: int, out: str, err: str) -> None:
    assert code == 1
    lines = err.splitlines()
    assert lines[0].startswith("train 1, ")
    assert lines[1:] == [REASON]
    assert "disk" not in out


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_that_stops_prints_the_reason_once(
    failing_run: Callable[..., Printed], workers: int
) -> None:
    """The other worker may be about to reply, or about to receive its next message."""
    check_reason(*failing_run(f"engine.workers={workers}"))


@pytest.mark.slow
def test_a_process_of_its_own_prints_the_same(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "fedhet", *FAULTY, "engine.workers=2", "hydra.run.dir=run"],
        env=os.environ
        | {"FEDHET_TRUST": "faulty", "PYTHONPATH": f"{HERE.parents[1]}{os.pathsep}{HERE}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    check_reason(process.returncode, process.stdout, process.stderr)


def test_a_client_that_is_left_out_is_named_once(failing_run: Callable[..., Printed]) -> None:
    code, out, err = failing_run("on_failure=skip", "replies.max_lost=1")
    assert code == 0, err
    assert err.count("the disk is full") == 1
    assert "1 client failed" in err
    assert "disk" not in out


def test_where_every_client_fails_each_is_named_once(failing_run: Callable[..., Printed]) -> None:
    """Here the weights of all of them diverge."""
    code, _, err = failing_run("on_failure=skip", "client.lr=1e30")
    assert code == 1
    for client in range(4):
        assert err.count(f"client {client} failed") == 1
    assert err.startswith("error: client ")


def test_an_author_can_see_where_a_client_failed(
    failing_run: Callable[..., Printed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDHET_TRACEBACK", "1")
    code, _, err = failing_run("engine.workers=2")
    assert code == 1
    assert f'{HERE / "faulty.py"}", line' in err
