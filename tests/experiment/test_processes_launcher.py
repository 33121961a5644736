"""hydra/launcher=processes: the runs are those of a plain sweep, and none can harm another."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from fedhet import __main__ as main
from fedhet.core.errors import ConfigError
from fedhet.runs.config import resuming
from fedhet.study import executors
from fedhet.study.executors import Processes

ROOT = Path(__file__).parents[2]
SECONDS = 120.0
ON_PROCESSES = ("-m", "hydra/launcher=processes", "hydra.launcher.workers=2")


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def read(folder: Path, name: str = "summary.json") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / name).read_text())
    return content


def cell(folder: Path, name: str) -> Path:
    (found,) = folder.glob(f"*{name}*")
    return found


class Swept(NamedTuple):
    """Two sweeps of one process that starts runs.

    Attributes:
        home: the folder that holds both.
        code: the exit code of the first.
        out: what it printed.
        err: what it printed to stderr.
        killed: the exit code of the second, of which a run kills itself.
        reason: what that printed to stderr.
    """

    home: Path
    code: int
    out: str
    err: str
    killed: int
    reason: str


SMALL = ["method=fednorm", "model.hidden=[8]", "client.epochs=1", "partition.clients=4"]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Swept:
    home = tmp_path_factory.mktemp("swept")
    small = [*ON_PROCESSES, *SMALL, "figures=false"]
    axes = ["rounds=2,1", "dataset=digits,mnist", "data_dir=/nowhere"]
    kills = ["plugin.fednorm._target_=faulty.Faulty", "plugin.fednorm.z_when=killed,never"]
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDHET_TRUST", "faulty")
        patch.syspath_prepend(str(ROOT / "tests" / "engines"))
        patch.chdir(ROOT / "tests" / "engines")
        for name, lines in (("first", axes), ("second", [*kills, "rounds=2"])):
            out, err = StringIO(), StringIO()
            with redirect_stdout(out), redirect_stderr(err):
                code = main.main([*small, *lines, f"hydra.sweep.dir={home / name}"])
            found.append((code, out.getvalue(), err.getvalue()))
    (code, first_out, first_err), (killed, _, reason) = found
    return Swept(home, code, first_out, first_err, killed, reason)


def test_a_sweep_has_the_runs_of_single_runs(swept: Swept, launch: Callable[..., Any]) -> None:
    folder = swept.home / "first"
    assert swept.code == 1
    for number, rounds in ((0, 2), (2, 1)):
        single = launch(*SMALL, f"rounds={rounds}")
        done = cell(folder, f"{number}-dataset")
        assert read(done)["weights_sha256"] == single.summary["weights_sha256"]
        assert f"train {rounds}, acc_global" in (done / "log.txt").read_text()
        failed = cell(folder, f"{number + 1}-dataset")
        assert read(failed, "cell.json")["status"] == "failed"
        assert read(failed, "cell.json")["reason"].startswith("data not found")
        assert "error: data not found" in (failed / "log.txt").read_text()
        assert not resuming.is_cell(failed)
    told = f"to compare the runs: python -m fedhet report {folder}"
    assert swept.out == f"run folder: {folder}\n{told}\n"
    lines = swept.err.splitlines()
    assert sum(": failed" not in line for line in lines[:4]) == 2
    assert sum(": failed: data not found" in line for line in lines[:4]) == 2
    assert [line.partition("]")[0] for line in lines[:4]] == [f"[{n}/4" for n in range(1, 5)]
    assert [line.split(":")[1] for line in lines[4:]] == [" job 1", " job 3"]


def test_a_run_that_is_killed_costs_itself_alone(swept: Swept) -> None:
    assert swept.killed == 1
    killed = cell(swept.home / "second", "=killed")
    assert read(killed, "cell.json")["status"] == "failed"
    assert "its process was ended by SIGKILL" in read(killed, "cell.json")["reason"]
    assert "failed: its process was ended by SIGKILL" in swept.reason
    assert read(cell(swept.home / "second", "=never"))["status"] == "ok"


@pytest.mark.slow
def test_the_runs_are_those_of_single_runs(
    tmp_path: Path, launch: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """Whatever the order in which they end: the second one has half of the work."""
    folder = tmp_path / "sweep"
    axes = ["method=fednorm", "rounds=3,1", "seed=0,1", "dataset=digits,mnist", "data_dir=/nowhere"]
    assert main.main([*ON_PROCESSES, *axes, f"hydra.sweep.dir={folder}"]) == 1
    out, err = capfd.readouterr()
    for rounds in (3, 1):
        for seed in (0, 1):
            single = launch("method=fednorm", f"rounds={rounds}", f"seed={seed}")
            done = cell(folder, f"digits*rounds={rounds},seed={seed}")
            assert read(done)["weights_sha256"] == single.summary["weights_sha256"]
            assert f"train {rounds}, acc_global" in (done / "log.txt").read_text()
            assert (done / "figures" / "labels.pdf").exists()
            failed = cell(folder, f"mnist*rounds={rounds},seed={seed}")
            assert read(failed, "cell.json")["status"] == "failed"
            assert read(failed, "cell.json")["reason"].startswith("data not found")
            assert "error: data not found" in (failed / "log.txt").read_text()
            assert not resuming.is_cell(failed)  # so it may go on with other rounds
    told = f"to compare the runs: python -m fedhet report {folder}"
    assert out == f"run folder: {folder}\n{told}\n"
    lines = err.splitlines()
    assert sum("] acc_global 0." in line for line in lines[:8]) == 4
    assert sum(": failed: data not found" in line for line in lines[:8]) == 4
    assert [line.partition("]")[0] for line in lines[:8]] == [f"[{n}/8" for n in range(1, 9)]
    numbers = [line.split(":")[1] for line in lines[8:]]
    assert numbers == [f" job {number}" for number in (1, 3, 5, 7)]


def test_a_wrong_number_of_workers(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["-m", "hydra/launcher=processes", "hydra.launcher.workers=0", "seed=0,1"]
    assert main.main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: hydra.launcher.workers=0") and "whole number >= 1" in err
    for workers in (0, -1, 1.5, "many", True):
        with pytest.raises(ConfigError, match="whole number >= 1"):
            Processes(workers)  # type: ignore[arg-type]
    assert Processes(3).places == 3


def test_where_processes_cannot_be_forked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(executors.multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    assert main.main([*ON_PROCESSES, "seed=0,1"]) == 2
    assert "this system cannot fork processes" in capsys.readouterr().err


def test_the_cores_are_those_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "CGROUP", tmp_path)
    monkeypatch.setattr(executors.psutil.Process, "cpu_affinity", lambda process: [*range(8)])
    assert executors.usable_cores() == 8
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert executors.usable_cores() == 8
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    assert executors.usable_cores() == 3
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    for quota, cores in (("-1", 8), ("50000", 1)):
        (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota)
        assert executors.usable_cores() == cores


# ---- processes that are killed
@pytest.mark.usefixtures("own_process")
def test_an_interrupt_ends_what_runs_and_starts_no_more(
    swept: Swept,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "sweep"
    wait = Processes.wait

    def waits(launcher: Processes, handles: Any) -> None:
        if any(rows.stat().st_size for rows in folder.glob("*seed=0/rounds.jsonl")):
            monkeypatch.setattr(Processes, "wait", wait)
            signal.raise_signal(signal.SIGINT)
        wait(launcher, handles)

    monkeypatch.setattr(Processes, "wait", waits)
    lines = ["hydra.launcher.workers=1", *SMALL, "figures=false", "rounds=100000", "seed=0,1"]
    assert main.main([*ON_PROCESSES[:2], *lines, f"hydra.sweep.dir={folder}"]) == 130
    ended = read(cell(folder, "seed=0"))
    assert (ended["status"], ended["reason"]) == ("interrupted", "stopped by the user")
    assert not [*folder.glob("*seed=1*")]
    assert capsys.readouterr().err.endswith("interrupted\n")
    assert not multiprocessing.active_children()


class Sweep:
    """A sweep of runs without end, in a process group of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "fedhet", *ON_PROCESSES, "seed=0,1,2", "rounds=100000"]
        self.process = subprocess.Popen(
            [*command, f"hydra.sweep.dir={folder}"],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.wait(lambda: all(map(self.trains, (0, 1))))
        everybody = psutil.Process(self.process.pid).children(recursive=True)
        self.cells = sorted(
            (each for each in everybody if each.ppid() != self.process.pid),
            key=lambda each: each.pid,
        )
        self.everybody = everybody

    def trains(self, seed: int) -> bool:
        rows = [*self.folder.glob(f"*seed={seed}/rounds.jsonl")]
        return bool(rows) and rows[0].stat().st_size > 0

    def wait(self, happened: Callable[[], bool]) -> None:
        until = time.monotonic() + SECONDS
        while not happened():
            assert time.monotonic() < until and self.process.poll() is None
            time.sleep(0.05)

    def end(self) -> str:
        """Wait for its end, and for that of all its processes; return its stderr."""
        _, err = self.process.communicate(timeout=SECONDS)
        _, left = psutil.wait_procs(self.everybody, timeout=10)
        assert not left
        return err


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[Sweep]:
    running = Sweep(tmp_path / "sweep")
    yield running
    if running.process.poll() is None:
        os.killpg(running.process.pid, signal.SIGKILL)
        running.process.communicate()


@pytest.mark.slow
def test_a_killed_worker_costs_its_run_alone_and_ctrl_c_ends_all(sweep: Sweep) -> None:
    sweep.cells[0].kill()
    sweep.wait(lambda: sweep.trains(2))  # its place is taken by the next
    killed = cell(sweep.folder, "seed=0")
    assert read(killed, "cell.json")["status"] == "failed"
    assert "its process was ended by SIGKILL" in read(killed, "cell.json")["reason"]
    sweep.everybody += psutil.Process(sweep.process.pid).children(recursive=True)
    os.killpg(sweep.process.pid, signal.SIGINT)  # as the terminal sends it, to all of them
    err = sweep.end()
    assert sweep.process.returncode == 130
    for seed in (1, 2):
        ended = read(cell(sweep.folder, f"seed={seed}"))
        assert (ended["status"], ended["reason"]) == ("interrupted", "stopped by the user")
    assert "[1/3] seed=0: failed: its process was ended by SIGKILL" in err
    assert err.endswith("interrupted\n")
    assert "Traceback" not in err


@pytest.mark.slow
def test_ctrl_c_while_the_first_process_imports_what_runs_need(tmp_path: Path) -> None:
    """Before any run is there."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fedhet", *ON_PROCESSES, f"hydra.sweep.dir={tmp_path}", "seed=0,1"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until = time.monotonic() + SECONDS
    while not any("forkserver" in " ".join(each.cmdline()) for each in _children(process.pid)):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.02)
    time.sleep(0.5)  # it is importing torch
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130, err
    assert err.endswith("interrupted\n") and "Traceback" not in err


def _children(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children()
    return []


@pytest.mark.slow
def test_no_process_outlives_a_killed_parent(sweep: Sweep) -> None:
    sweep.process.kill()
    sweep.end()
