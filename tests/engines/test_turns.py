"""Runs of one SuperLink take turns by the lock of the file that FEDHET_QUEUE names.

Here they are processes, as Flower starts one for each run.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from fedhet.core.errors import ConfigError
from fedhet.deploy import superlink
from fedhet.flower.turns import QUEUE, take_turn


class Run:
    """A process, forked from this one, that takes its turn and then works for ever."""

    def __init__(self, number: int, queue: Path) -> None:
        hears, self._tells = os.pipe()
        said, says = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._tells)
            try:
                work(number, queue, hears, says)
            finally:
                os._exit(1)
        os.close(hears)
        os.close(says)
        self._said = os.fdopen(said)
        self.code: int | None = None

    def says(self) -> str:
        return self._said.readline().strip()

    def stop(self) -> None:
        """As Flower does it after `flwr stop`: by a signal that a thread raises."""
        os.write(self._tells, b"stop")
        self._end()

    def kill(self) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            self._end()

    def runs(self) -> bool:
        return os.waitpid(self.pid, os.WNOHANG) == (0, 0)

    def _end(self) -> None:
        self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self._tells)
        self._said.close()


def work(number: int, queue: Path, hears: int, says: int) -> None:
    """What such a process does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    out = os.fdopen(says, "w", buffering=1)
    log = logging.getLogger("fedhet")
    log.handlers = [logging.StreamHandler(out)]
    log.setLevel(logging.INFO)

    def stopped() -> None:
        if os.read(hears, 4):
            signal.raise_signal(signal.SIGINT)

    threading.Thread(target=stopped, daemon=True).start()
    os.environ[QUEUE] = str(queue)
    try:
        take_turn(number)
        print("begins", file=out)
        time.sleep(600)
    except KeyboardInterrupt:
        os._exit(130)


def test_runs_wait_in_the_order_in_which_they_came_whatever_ends_them(tmp_path: Path) -> None:
    runs = []
    try:
        for number in range(1, 5):
            runs.append(Run(number, tmp_path / "queue"))
            expected = "begins" if number == 1 else "waiting for the end of run 1"
            assert runs[-1].says() == expected
        runs[2].stop()  # while it waits
        assert runs[2].code == 130
        runs[0].kill()
        assert runs[1].says() == "begins"
        assert runs[3].runs()
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
        assert line == "waiting for the end of another run"
        assert superlink._STEP.findall(f"fedhet: {line}\n") == [
            "waiting for the end of another run"
        ]
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
