"""A run in the foreground of a terminal, as a user starts and interrupts it."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest

SECONDS = 300  # on a busy machine; a quiet one needs a tenth
CTRL_C = b"\x03"
TAG = "FEDHET_TEST_RUN"  # a variable that all processes of a run inherit


class Foreground:
    """`python -m fedhet <overrides>` at a terminal of its own, killed at the end of the block.

    Attributes:
        folder: the run folder.
        output: what the terminal has shown, also before its lines were overwritten.
    """

    def __init__(
        self, folder: Path, *overrides: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self.folder = folder
        self.output = ""
        command = [sys.executable, "-m", "fedhet", *overrides, f"hydra.run.dir={folder}"]
        variables = {**os.environ, **(environment or {}), TAG: str(folder)}
        self._pid, self._terminal = pty.fork()
        if self._pid == 0:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the end of the terminal ends nothing
            os.execve(sys.executable, command, variables)

    def __enter__(self) -> Foreground:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes():  # there are some if the test has failed
            process.kill()

    def wait_until(self, ready: Callable[[], object]) -> None:
        """Wait until `ready` returns something true, while the run goes on."""
        deadline = time.monotonic() + SECONDS
        while not ready():
            assert self._read() and time.monotonic() < deadline, self.output

    def has_rounds(self) -> bool:
        """Whether the run has recorded a step."""
        rounds = self.folder / "rounds.jsonl"
        return rounds.exists() and rounds.stat().st_size > 0

    def press_ctrl_c(self) -> None:
        os.write(self._terminal, CTRL_C)

    def terminate(self) -> None:
        """Send SIGTERM to the run, as a batch system does."""
        os.kill(self._pid, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the run, and wait for its own process to end."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._terminal)

    def end(self) -> int:
        """Wait for the end of the run, which leaves no process behind; return its exit code."""
        deadline = time.monotonic() + SECONDS
        while self._read():
            assert time.monotonic() < deadline, self.output
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        os.close(self._terminal)
        _, alive = psutil.wait_procs(self.processes(), timeout=10)
        assert not alive, [" ".join(process.cmdline()) for process in alive]
        return 128 - code if code < 0 else code

    def processes(self) -> list[psutil.Process]:
        """The processes of the run, which need not be its descendants any more."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(TAG) == str(self.folder):
                    found.append(process)
            except psutil.Error:  # ended meanwhile, or another user's
                continue
        return found

    def _read(self) -> bool:
        """Read what there is, and return whether the terminal is still in use."""
        if select.select([self._terminal], [], [], 0.05)[0]:
            try:
                text = os.read(self._terminal, 65536)
            except OSError:  # Linux: the last process at the terminal has ended
                return False
            self.output += text.decode(errors="replace")
            return bool(text)
        return True


def last_lines(output: str) -> list[str]:
    """The last two lines that the user sees, without the terminal's control sequences."""
    text = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]|\^C", "", output)
    return [line for line in re.split(r"[\r\n]+", text) if line.strip()][-2:]


def in_place_of_flwr(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine call a program that executes its arguments, where it would call `flwr`."""
    program = folder / "flwr"
    program.write_text('#!/bin/sh\nexec "$@"\n')
    program.chmod(0o700)
    monkeypatch.setattr("fedhet.engines.flwr.BIN", folder)
