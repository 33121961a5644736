"""A SuperNode that is alive and disconnected is noticed, and ended."""

from __future__ import annotations

import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest

from fedhet.core.errors import RunFailed
from fedhet.deploy import folders, supervisor

NODE = """#!{python}
import pathlib, signal, subprocess, sys, time
pathlib.Path(sys.argv[1], "pid").write_text(str(__import__("os").getpid()))
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "nameless" not in sys.argv:
    print("INFO :      SuperNode ID: 77", flush=True)
if "ends" in sys.argv:
    sys.exit(7)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1], "child").write_text(str(child.pid))
time.sleep(600)
"""


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A program in the place of flower-supernode, which never connects to anything."""
    path = tmp_path / "flower-supernode"
    path.write_text(NODE.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(supervisor, "BIN", tmp_path)
    return path.name


def wait_until(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not true() and time.monotonic() < deadline:
        time.sleep(0.05)
    return true()


class SuperLink:
    """Answers in order; the last answer is repeated. The node has started before the first one."""

    def __init__(self, folder: Path, *answers: str | None) -> None:
        self.folder = folder
        self.answers = list(answers)
        self.asked = 0

    def __call__(self) -> Mapping[str, str]:
        assert wait_until((self.folder / "child").exists)
        if not self.asked:
            time.sleep(0.5)  # for the line that the node has printed before
        answer = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        if answer is None:
            raise RunFailed("connection refused")
        return {"77": answer, "78": "online"}


def watch(folder: Path, node: str, ask: SuperLink, *words: str, every: float = 0.1) -> int:
    return supervisor.supervise([node, str(folder), *words], os.environ, ask, every=every)


def gone(folder: Path) -> bool:
    """Whether neither the program nor what it has started is running."""
    pids = [int((folder / name).read_text()) for name in ("pid", "child")]

    def running(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return wait_until(lambda: not any(map(running, pids)))


@pytest.mark.parametrize("words", [(), ("deaf",)])
def test_a_disconnected_node_is_ended(
    node: str,
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(supervisor, "END_SECONDS", 0.5)
    ask = SuperLink(tmp_path, "online", "offline")
    with caplog.at_level(logging.WARNING, "fedhet.deploy"):
        assert watch(tmp_path, node, ask, *words) == 1
    assert ask.asked == 1 + supervisor.PATIENCE
    assert "offline (3 of 3)" in caplog.text
    assert gone(tmp_path)


def test_a_node_that_never_connects_is_ended(node: str, tmp_path: Path) -> None:
    ask = SuperLink(tmp_path, "online")
    assert watch(tmp_path, node, ask, "nameless") == 1
    assert ask.asked == supervisor.PATIENCE


def test_a_short_absence_and_a_silent_server_end_nothing(node: str, tmp_path: Path) -> None:
    """Only looks in a row count; when the server is back, they are counted anew."""
    quiet = ["offline", "offline", "online", "offline", "offline", None, "offline", None, None]
    ask = SuperLink(tmp_path, *quiet, "online")

    def end_when_asked() -> None:
        wait_until(lambda: ask.asked > len(quiet))
        psutil.Process(int((tmp_path / "pid").read_text())).terminate()

    threading.Thread(target=end_when_asked).start()
    assert watch(tmp_path, node, ask) == -15
    assert ask.asked > len(quiet)


def test_the_exit_code_is_the_nodes(node: str, tmp_path: Path) -> None:
    assert watch(tmp_path, node, SuperLink(tmp_path, "online"), "ends", every=120) == 7


def test_ctrl_c_ends_the_node(node: str, tmp_path: Path) -> None:
    def ask() -> Mapping[str, str]:
        assert wait_until((tmp_path / "child").exists)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        supervisor.supervise([node, str(tmp_path)], os.environ, ask, every=0.1)
    assert gone(tmp_path)


def test_a_node_is_killed_with_its_supervisor(node: str, tmp_path: Path) -> None:
    """Also one that ignores signals."""
    watching = f"""
import os
from pathlib import Path
from fedhet.deploy import supervisor
supervisor.BIN = Path({str(tmp_path)!r})
supervisor.supervise([{node!r}, {str(tmp_path)!r}, "deaf"], os.environ, dict)
"""
    with subprocess.Popen([sys.executable, "-c", watching]) as watcher:
        assert wait_until((tmp_path / "child").exists)
        watcher.send_signal(signal.SIGKILL)
    psutil.Process(int((tmp_path / "child").read_text())).kill()  # which knows nothing of this
    assert gone(tmp_path)


@pytest.mark.parametrize("folder", ["server", "sites/a"])
def test_a_held_port_is_told_with_the_process_that_holds_it(kit: Path, folder: str) -> None:
    place = folders.read(kit / folder)
    with (
        socket.create_server(("127.0.0.1", place.port)),
        pytest.raises(RunFailed, match=f"{place.port} .*held .*process {os.getpid()}"),
    ):
        supervisor.run(place)


def test_a_program_that_is_missing_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"nothing .*started: No such file"):
        supervisor.supervise(["nothing"], os.environ, SuperLink(tmp_path, "online"))
