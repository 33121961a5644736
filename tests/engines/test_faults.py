"""Faults around the clients: dying workers, state folders, engines that do not start, threads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedhet
from fedhet.core.client.client import FedClient
from fedhet.core.kernel import Result, State
from fedhet.core.messages import Broadcast, Reply, Upload
from fedhet.core.server.loop import Clock
from fedhet.data.toy import toy_task
from fedhet.engines import pool
from fedhet.engines.pool import PoolTransport
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.runs import stores
from fedhet.runs.config import compose
from fedhet.runs.job import Job


def scaffold_job() -> Job:
    return Job(compose(["method=scaffold", "client.lr=.1", "rounds=2"]), toy_task(4))


def test_a_worker_that_dies_while_idle_is_replaced_and_nothing_is_lost(tmp_path: Path) -> None:
    disturbed = scaffold_job()
    strategy = disturbed.strategy
    with PoolTransport(2, disturbed, tmp_path) as transport:
        step = strategy.plan(1)
        strategy.finish_step(step, transport.exchange(step.messages, Clock()))
        for worker in list(transport._workers.values()):
            os.kill(worker.process.pid, signal.SIGKILL)
            worker.process.join()
        step = strategy.plan(2)
        replies = list(transport.exchange(step.messages, Clock()))
        assert [type(reply) for reply in replies] == [Upload] * 4
        strategy.finish_step(step, replies)
    calm = scaffold_job()
    (tmp_path / "calm").mkdir()
    with PoolTransport(2, calm, tmp_path / "calm") as transport:
        for number in (1, 2):
            step = calm.strategy.plan(number)
            calm.strategy.finish_step(step, transport.exchange(step.messages, Clock()))
    for name, expected in calm.strategy.weights["model"].items():
        assert torch.equal(strategy.weights["model"][name], expected)


def run_elsewhere(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    """A run in another process."""
    command = [sys.executable, "-m", "fedhet", *overrides, f"hydra.run.dir={folder}"]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder.parent
    )


WORKERS = ["method=fedavg", "engine.workers=2", "eval.clients=false"]


@pytest.mark.slow
def test_workers_end_silently(tmp_path: Path) -> None:
    with run_elsewhere(tmp_path / "run", *WORKERS, "rounds=2") as process:
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 0
    assert output.splitlines()[-1] == f"run folder: {tmp_path / 'run'}"
    assert "Traceback" not in errors and "KeyboardInterrupt" not in errors


@pytest.mark.matrix
def test_workers_with_threads_of_their_own(tmp_path: Path) -> None:
    """They are not forked: without OpenMP's threads the first large product would hang."""
    code = (
        "import fedhet\n"
        "if __name__ == '__main__':\n"
        "    fedhet.run(['method=fedavg', 'rounds=1', 'model=cnn', 'engine.workers=2',"
        " 'engine.threads=2', 'eval.clients=false', 'client.epochs=1', 'partition.clients=3',"
        " 'hydra.run.dir=run'])\n"
    )
    (tmp_path / "main.py").write_text(code)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    subprocess.run(
        [sys.executable, "main.py"],
        cwd=tmp_path,
        env=environment,
        check=True,
        timeout=120,
        capture_output=True,
    )
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "ok"


def test_old_states_are_removed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDHET_STATE_DIR", str(tmp_path))
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "chapter").write_text("years of work")
    old = stores.state_folder("1")
    notes = tmp_path / "fedhet-state" / "notes"
    notes.mkdir()
    long_ago = time.time() - 90 * 86400
    for path in (thesis, notes, old, old / stores.MARK):
        os.utime(path, (long_ago, long_ago))
    fresh = stores.state_folder("2")
    assert fresh.is_dir() and not old.exists()
    assert notes.is_dir()
    assert (thesis / "chapter").read_text() == "years of work"
    monkeypatch.setenv("FEDHET_STATE_DIR", "")
    assert Path.cwd() not in stores.state_folder("empty").parents


def test_an_engine_that_fails_to_start_is_a_failed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(PoolTransport, "_start", broken)
    with pytest.raises(fedhet.RunFailed, match=r"OSError: .*more processes") as caught:
        fedhet.run(["engine.workers=2", f"hydra.run.dir={tmp_path / 'run'}"], task=toy_task())
    assert caught.value.folder == str(tmp_path / "run")
    assert '"status": "failed"' in (tmp_path / "run" / "summary.json").read_text()


def test_a_run_restores_the_number_of_threads(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    try:
        folder = f"hydra.run.dir={tmp_path / 'run'}"
        fedhet.run(["method=fedavg", "rounds=1", "figures=false", folder], task=toy_task())
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_an_extra_that_cannot_travel_fails_alike_in_every_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish(self: Any, msg: Any, state: State, ctx: Any, fitted: Any) -> tuple[Result, State]:
        return Result(extras={"z": np.float32(1)}), state

    monkeypatch.setattr(FedNormPlugin, "finish", finish)
    reasons = set()
    for workers in (1, 2):
        lines = ["method=fednorm", f"engine.workers={workers}"]
        with pytest.raises(fedhet.RunFailed) as caught:
            fedhet.run([*lines, f"hydra.run.dir={tmp_path}/{workers}"], task=toy_task())
        reasons.add(caught.value.reason)
    assert len(reasons) == 1
    assert "extra 'fednorm.z' is a float32" in reasons.pop()


def test_replies_that_wait_for_a_slow_client_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first client of the cohort is the slowest, so the replies of the others wait.

    No more than AHEAD_BYTES of them are held, or as many replies as there are workers.
    """
    handle = FedClient.handle
    job = Job(compose(["method=fedavg"]), toy_task(8))
    plan = job.strategy.plan(1).messages
    first = plan[0].pid

    def slow(self: FedClient, msg: Broadcast) -> Reply:
        if msg.pid == first:
            time.sleep(0.5)
        (tmp_path / f"began-{msg.pid}").touch()
        return handle(self, msg)

    monkeypatch.setattr(FedClient, "handle", slow)
    monkeypatch.setattr(pool, "AHEAD_BYTES", 1)
    (tmp_path / "pool").mkdir()
    with PoolTransport(2, job, tmp_path / "pool") as transport:
        replies = transport.exchange(plan, Clock())
        assert isinstance(next(replies), Upload)
        began = list(tmp_path.glob("began-*"))
        assert len(began) == 3  # the slow one, and two that wait for it
        assert [reply.pid for reply in replies] == [msg.pid for msg in plan[1:]]
