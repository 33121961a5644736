"""A run that is killed leaves nothing behind, and a client that hangs does not hold up its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from foreground import Foreground

import fedhet
from fedhet.core.client.client import FedClient
from fedhet.core.messages import Broadcast, Reply
from fedhet.data.toy import toy_task

HERE = Path(__file__).parent
SECONDS = 120  # on a busy machine; a quiet one needs one
ENGINES = pytest.mark.parametrize(
    "engine",
    [
        pytest.param(["engine.workers=2"], marks=pytest.mark.slow),
        pytest.param(["engine=ray"], marks=pytest.mark.matrix),
        pytest.param(["engine=flwr", "engine.workers=2"], marks=pytest.mark.matrix),
    ],
    ids=["workers", "ray", "flwr"],
)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's way to end children")


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A temporary folder for the run, with a path short enough for Ray's sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def stuck_client(tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides with which client 3 leaves the file tmp_path/stuck in step 2, and then hangs."""
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setenv("FEDHET_TRUST", "faulty")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("FEDHET_TEST_FOLDER", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)  # Flower would use that cluster
    return [
        "method=scaffold",
        "client.lr=.1",
        "plugin=[fednorm]",
        "plugin.fednorm._target_=faulty.Faulty",
        "plugin.fednorm.z_when=stuck",
        "eval.clients=false",
    ]


def left_behind(run: Foreground, folder: Path) -> list[str]:
    """Processes of the run, and what it has put into the temporary folder, but for Ray's logs."""
    processes = []
    for process in run.processes():
        with suppress(psutil.NoSuchProcess):  # one that has ended meanwhile
            processes.append(" ".join(process.cmdline()))
    return processes + [path.name for path in folder.iterdir() if path.name != "ray"]


def wait_for(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.1)


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def test_a_killed_fork_leaves_no_worker_and_no_state(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run in a process that is forked from this one; its clients hang."""
    began = tmp_path / "began"
    began.mkdir()

    def hangs(client: FedClient, msg: Broadcast) -> Reply:
        (began / str(os.getpid())).touch()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM, signal.SIGTERM])
        time.sleep(100_000)
        raise AssertionError

    monkeypatch.setattr(FedClient, "handle", hangs)
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    lines = ["method=fedavg", "engine.workers=2", f"hydra.run.dir={tmp_path / 'run'}"]
    pid = os.fork()
    if pid == 0:
        try:
            fedhet.run(lines, task=toy_task(4))
        finally:
            os._exit(1)
    wait_for(lambda: len([*began.iterdir()]) == 2)
    workers = [int(path.name) for path in began.iterdir()]
    assert all(map(lives, workers)) and [*scratch.iterdir()]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    wait_for(lambda: not any(map(lives, workers)) and not [*scratch.iterdir()])
    assert not any(map(lives, workers)) and not [*scratch.iterdir()]


@ENGINES
def test_a_killed_run_leaves_no_process_and_no_state(
    tmp_path: Path, scratch: Path, stuck_client: list[str], engine: list[str]
) -> None:
    """Not even a client that hangs where no signal handler and no thread of Python runs."""
    with Foreground(tmp_path / "run", *stuck_client, *engine, "rounds=100000") as run:
        run.wait_until((tmp_path / "stuck").exists)
        assert left_behind(run, scratch)
        run.kill()
        wait_for(lambda: not left_behind(run, scratch))
        assert left_behind(run, scratch) == []
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "interrupted"


@ENGINES
def test_a_run_ends_although_a_client_hangs(
    tmp_path: Path, scratch: Path, stuck_client: list[str], engine: list[str]
) -> None:
    """It hangs in the last round, which the deadline closes; nothing waits for it afterwards."""
    limits = ["on_failure=skip", "replies.deadline=3", "replies.grace=1", "replies.max_lost=1"]
    with Foreground(tmp_path / "run", *stuck_client, *engine, *limits, "rounds=2") as run:
        assert run.end() == 0, run.output
        assert left_behind(run, scratch) == []
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "ok"
    assert {failure["pid"] for failure in summary["failures"]} == {3}


OWNER = """
import subprocess, sys
from fedhet.runs.guard import guard_children
guard_children()
deaf = "trap '' TERM; sleep 600 & echo $! $$; wait"
subprocess.Popen(["bash", "-c", deaf], start_new_session=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, None])
def test_children_end_soon_after_their_guarded_parent(end: signal.Signals | None) -> None:
    """In a session of their own, deaf to SIGTERM, and nobody has waited for their parent."""
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdin and owner.stdout
        children = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
        owner.stdin.close() if end is None else owner.send_signal(end)
        _, left = psutil.wait_procs(children, timeout=5)
        for child in left:
            child.kill()
        assert not left
