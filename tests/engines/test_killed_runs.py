"""Real processes that are killed (SIGKILL) at random instants, and go on to the same end."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fedhet
from fedhet.runs import config
from fedhet.runs.record.lock import Lock
from fedhet.runs.record.outcome import Run
from fedhet.testing import check_equal, run_quietly

LINES = [
    "method=scaffold",
    "plugin=[fednorm]",
    "rounds=12",
    "fraction=.5",
    "client.lr=.05",
    "eval.every=3",
    "checkpoint.every=0",
]
SECONDS = 300  # on a busy machine


def started(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "fedhet", *LINES, *more, f"hydra.run.dir={folder}"]
    output = subprocess.DEVNULL
    return subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the run's own process only: its workers must notice it themselves."""
    process.send_signal(signal.SIGKILL)
    process.wait()


def wait_for_rounds(folder: Path, process: subprocess.Popen[bytes], rounds: int) -> None:
    file = folder / "rounds.jsonl"
    deadline = time.monotonic() + SECONDS
    while not file.exists() or file.read_bytes().count(b"\n") < rounds:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_quietly(config.compose(LINES), tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.slow
def test_a_run_with_workers_goes_on_in_a_process_of_its_own(whole: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = started(folder, "engine.workers=2")
    wait_for_rounds(folder, process, 4)
    with pytest.raises(fedhet.ConfigError, match=r"run .*running; stop .*first"):
        fedhet.run([f"resume={folder}"])
    kill(process)
    command = [sys.executable, "-m", "fedhet", f"resume={folder}"]
    resumed = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert resumed.returncode == 0, resumed.stderr
    assert "the run continues after round" in resumed.stderr
    assert resumed.stdout.splitlines()[-1] == f"run folder: {folder}"
    run = fedhet.load_run(folder)
    check_equal(whole, run, "killed", ignored=["config.yaml"])
    again = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert again.returncode == 2
    assert (
        again.stderr.startswith(f"error: resume={folder}: ") and "rounds=<more than" in again.stderr
    )


@pytest.mark.slow
def test_a_run_is_killed_twice(whole: Run, tmp_path: Path) -> None:
    """The second time in a step after that with which it went on."""
    folder = tmp_path / "run"
    process = started(folder)
    wait_for_rounds(folder, process, 3)
    kill(process)
    command = [sys.executable, "-m", "fedhet", f"resume={folder}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for_rounds(folder, process, 7)
    kill(process)
    run = run_quietly(config.compose([f"resume={folder}"]), folder)
    check_equal(whole, run, "killed twice")
    environment = json.loads((folder / "environment.json").read_text())
    first, second = (again["round"] for again in environment["resumed"])
    assert 2 <= first < second <= 12


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(20))
def test_killed_at_a_random_instant(whole: Run, tmp_path: Path, seed: int) -> None:
    """From the start of the process to the end of the run, and with either kind of courier."""
    draw = random.Random(seed)
    folder = tmp_path / "run"
    process = started(folder, f"engine.workers={1 + seed % 2}")
    if seed % 5:
        wait_for_rounds(folder, process, draw.randint(0, 11))
        time.sleep(draw.uniform(0, 0.3))
    else:
        time.sleep(draw.uniform(0, 6))
    kill(process)
    if not (folder / "overrides.yaml").exists():
        with pytest.raises(fedhet.ConfigError, match=rf"resume={folder}: .*overrides\.yaml"):
            fedhet.run([f"resume={folder}"])
        return
    if json.loads((folder / "summary.json").read_text())["status"] == "ok":
        # It was killed after its end was recorded, while it drew the figures.
        (folder / ".lock").unlink(missing_ok=True)
        run = fedhet.load_run(folder)
    else:
        run = run_quietly(config.compose([f"resume={folder}"]), folder)
    check_equal(whole, run, f"seed {seed}", ignored=["config.yaml"])


@pytest.mark.matrix
def test_a_run_through_flwr_goes_on(whole: Run, tmp_path: Path) -> None:
    """With the states that its clients have kept; once it has ended, Flower is not even started."""
    folder = tmp_path / "run"
    process = started(folder, "engine=flwr", "engine.workers=2")
    wait_for_rounds(folder, process, 2)
    kill(process)
    command = [sys.executable, "-m", "fedhet", f"resume={folder}"]
    resumed = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert resumed.returncode == 0, resumed.stderr
    run = fedhet.load_run(folder)
    assert run.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert list(run.rounds["weights_sha256"]) == list(whole.rounds["weights_sha256"])
    assert json.loads((folder / "environment.json").read_text())["resumed"]
    again = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert again.returncode == 2
    assert again.stderr.startswith(f"error: resume={folder}: ")


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    """Also one that a process holds which has forked meanwhile."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        Lock(tmp_path)
        child = os.fork()
        if child:
            os.write(write, child.to_bytes(8, "big"))
        time.sleep(SECONDS)
        os._exit(0)
    child = int.from_bytes(os.read(read, 8), "big")
    with pytest.raises(fedhet.ConfigError, match=f"^{tmp_path}: .*running"):
        Lock(tmp_path)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    lock = Lock(tmp_path)
    with pytest.raises(fedhet.ConfigError, match=f"^{tmp_path}: .*running"):
        Lock(tmp_path)
    lock.release()
    Lock(tmp_path).release()
    os.kill(child, signal.SIGKILL)


def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(*args: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", none)
    Lock(tmp_path).release()
    assert str(tmp_path) in caplog.text and "No locks available" in caplog.text


def test_a_folder_that_cannot_be_locked(tmp_path: Path) -> None:
    with pytest.raises(fedhet.ConfigError, match=f"{tmp_path / 'absent'} .*created"):
        Lock(tmp_path / "absent")
