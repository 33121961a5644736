"""Runs of one SuperLink take turns; here by processes, as Flower starts one for each run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedhet.deploy import superlink
from fedhet.errors import ConfigError
from fedhet.flower.turns import QUEUE, take_turn

CODE = """
import signal, sys, threading, time
from fedhet.flower.turns import take_turn
from fedhet.record import terminal
terminal.log_to_stderr()
stopped = lambda: sys.stdin.readline() and signal.raise_signal(signal.SIGINT)
threading.Thread(target=stopped, daemon=True).start()
take_turn(int(sys.argv[1]))
print("begins", file=sys.stderr, flush=True)
time.sleep(600)
"""


class Run:
    """A process that takes its turn and then works for ever."""

    def __init__(self, number: int, queue: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CODE, str(number)],
            env={**os.environ, QUEUE: str(queue)},
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def says(self) -> str:
        assert self.process.stderr
        return self.process.stderr.readline().strip()

    def stop(self) -> None:
        """As Flower does it after `flwr stop`: by a signal that a thread raises."""
        self.process.communicate("stop\n", 30)

    def kill(self) -> None:
        self.process.kill()
        with self.process:
            self.process.wait(60)


def test_runs_wait_in_the_order_in_which_they_came_whatever_ends_them(tmp_path: Path) -> None:
    runs = []
    try:
        for number in range(1, 5):
            runs.append(Run(number, tmp_path / "queue"))
            expected = "begins" if number == 1 else "fedhet: waiting for the end of run 1"
            assert runs[-1].says() == expected
        runs[2].stop()  # while it waits
        assert runs[2].process.returncode == -signal.SIGINT
        runs[0].kill()
        assert runs[1].says() == "begins"
        assert runs[3].process.poll() is None
        runs[1].kill()
        assert runs[3].says() == "begins"
    finally:
        for run in runs:
            run.kill()


def test_a_run_that_has_not_yet_written_its_number_is_waited_for(tmp_path: Path) -> None:
    first, second = Run(1, tmp_path / "queue"), None
    try:
        assert first.says() == "begins"
        (tmp_path / "queue").write_text("")
        second = Run(2, tmp_path / "queue")
        line = second.says()
        assert line == "fedhet: waiting for the end of another run"
        assert superlink._STEP.findall(f"{line}\n") == ["waiting for the end of another run"]
    finally:
        for run in filter(None, (first, second)):
            run.kill()


def test_without_a_queue_nothing_waits_or_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(QUEUE, "")
    take_turn(1)
    monkeypatch.delenv(QUEUE)
    take_turn(2)
    assert not list(tmp_path.iterdir())


def test_a_queue_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(QUEUE, str(tmp_path / "missing" / "queue"))
    with pytest.raises(ConfigError, match=f"{QUEUE}=.*missing.*No such file"):
        take_turn(1)
