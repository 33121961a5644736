"""What goes wrong around the clients: worker processes that die, state folders, engines that do not
start, threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

import fedhet
from fedhet import state
from fedhet.config import compose
from fedhet.data.toy import toy_task
from fedhet.engines.pool import PoolCourier
from fedhet.job import Job
from fedhet.messages import Update
from fedhet.server import Clock


def job() -> Job:
    return Job(compose(["method=scaffold", "client.lr=.1", "rounds=2"]), toy_task(4))


def test_a_worker_that_dies_while_idle_is_replaced_and_nothing_is_lost(tmp_path: Path) -> None:
    mine = job()
    with PoolCourier(2, mine, tmp_path) as courier:
        mine.strategy.settle(courier.exchange(mine.strategy.plan(1), Clock()))
        for process in list(courier._workers.values()):
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        replies = list(courier.exchange(mine.strategy.plan(2), Clock()))
        assert [type(reply) for reply in replies] == [Update] * 4
        mine.strategy.settle(replies)
    calm = job()
    with PoolCourier(2, calm, tmp_path / "calm") as courier:
        for number in (1, 2):
            calm.strategy.settle(courier.exchange(calm.strategy.plan(number), Clock()))
    for name, expected in calm.strategy.weights["model"].items():
        assert torch.equal(mine.strategy.weights["model"][name], expected)


def run_elsewhere(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fedhet", *overrides, f"hydra.run.dir={folder}"]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder.parent
    )


def test_workers_end_without_a_word(tmp_path: Path) -> None:
    with run_elsewhere(
        tmp_path / "run", "method=fedavg", "rounds=2", "engine.workers=2", "eval.clients=false"
    ) as process:
        said, errors = process.communicate(timeout=120)
    assert process.returncode == 0
    assert said.splitlines()[-1] == f"run folder: {tmp_path / 'run'}"
    assert "Traceback" not in errors and "KeyboardInterrupt" not in errors


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    with run_elsewhere(
        tmp_path / "run", "method=fedavg", "rounds=100000", "engine.workers=2", "eval.clients=false"
    ) as process:
        rounds = tmp_path / "run" / "rounds.jsonl"
        deadline = time.monotonic() + 120
        while not (rounds.exists() and rounds.stat().st_size):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        workers = psutil.Process(process.pid).children(recursive=True)
        assert len(workers) == 2
        process.kill()
        process.communicate()
    assert psutil.wait_procs(workers, timeout=30)[1] == []
    assert '"interrupted"' in (tmp_path / "run" / "summary.json").read_text()


def test_old_states_go_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDHET_STATE_DIR", str(tmp_path))
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("years of work")
    old, mine = state.state_folder(1), tmp_path / "fedhet-state" / "notes"
    mine.mkdir()
    long_ago = time.time() - 90 * 86400
    for path in (tmp_path / "thesis", mine, old, old / state.MARK):
        os.utime(path, (long_ago, long_ago))
    fresh = state.state_folder(2)
    assert fresh.is_dir() and not old.exists()
    assert mine.is_dir() and (tmp_path / "thesis" / "chapter").read_text() == "years of work"
    monkeypatch.setenv("FEDHET_STATE_DIR", "")
    assert Path.cwd() not in state.state_folder("empty").parents


def test_an_engine_that_fails_to_start_is_a_failed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(PoolCourier, "_start", broken)
    with pytest.raises(fedhet.RunFailed, match="OSError: no more processes") as caught:
        fedhet.run(["engine.workers=2", f"hydra.run.dir={tmp_path / 'run'}"], task=toy_task())
    assert caught.value.folder == str(tmp_path / "run")
    assert '"status": "failed"' in (tmp_path / "run" / "summary.json").read_text()


def test_a_run_gives_the_threads_back(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    try:
        fedhet.run(
            ["method=fedavg", "rounds=1", f"hydra.run.dir={tmp_path / 'run'}"], task=toy_task()
        )
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_an_extra_that_cannot_travel_fails_alike_in_every_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np

    from fedhet.methods.fednorm import FedNormPlugin

    monkeypatch.setattr(
        FedNormPlugin,
        "finish",
        lambda self, update: update.extras.update({"fednorm.z": np.float32(1)}),
    )
    reasons = set()
    for workers in (1, 2):
        with pytest.raises(fedhet.RunFailed) as caught:
            fedhet.run(
                [
                    "method=fednorm",
                    f"engine.workers={workers}",
                    f"hydra.run.dir={tmp_path}/{workers}",
                ],
                task=toy_task(),
            )
        reasons.add(caught.value.reason)
    assert len(reasons) == 1 and "extra 'fednorm.z' is a float32" in reasons.pop()


def test_replies_that_wait_for_a_slow_client_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first client of a cohort is the slowest: what the others have sent meanwhile is held back
    by bytes, never below the workers."""
    from fedhet.client import FedClient
    from fedhet.engines import pool
    from fedhet.methods.fedavg import FedAvgClient

    handle = FedClient.handle

    def slow(self: FedClient, msg: object) -> object:
        if msg.pid == first:  # type: ignore[attr-defined]
            time.sleep(0.5)
        (tmp_path / f"began-{msg.pid}").touch()  # type: ignore[attr-defined]
        return handle(self, msg)  # type: ignore[arg-type]

    job = Job(compose(["method=fedavg"]), toy_task(8))
    plan = job.strategy.plan(1)
    first = plan[0].pid
    monkeypatch.setattr(FedAvgClient, "handle", slow)
    monkeypatch.setattr(pool, "AHEAD_BYTES", 1)
    with PoolCourier(2, job, tmp_path / "pool") as courier:
        replies = courier.exchange(plan, Clock())
        assert isinstance(next(replies), Update)
        assert len(list(tmp_path.glob("began-*"))) == 3  # the slow one, and two that wait for it
        assert [reply.pid for reply in replies] == [msg.pid for msg in plan[1:]]
