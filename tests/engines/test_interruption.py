"""Ctrl-C and SIGTERM end a run at once: one line, its record, no process left."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from foreground import Foreground, in_place_of_flwr, last_lines

from fedhet import __main__ as cli
from fedhet.core.client.client import FedClient
from fedhet.core.client.context import ClientContext
from fedhet.core.kernel import Message, State, Term
from fedhet.core.messages import Broadcast, Reply
from fedhet.core.server.loop import Clock
from fedhet.data.toy import toy_task
from fedhet.engines import flwr, pool
from fedhet.engines.pool import PoolTransport
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.runs.config import compose
from fedhet.runs.guard import TAG, TemporaryFolder
from fedhet.runs.job import Job

HERE = Path(__file__).parent
ENDLESS = ["method=fedavg", "rounds=100000", "eval.clients=false"]
SIGNALS = pytest.mark.parametrize("how", ["ctrl-c", "sigterm"])


def interrupt(run: Foreground, how: str) -> None:
    """Interrupt the run and check what the user then sees and finds."""
    run.press_ctrl_c() if how == "ctrl-c" else run.terminate()
    assert run.end() == 130, run.output
    assert last_lines(run.output) == [f"run folder: {run.folder}", "interrupted"]
    for noise in ("Traceback", "SIGTERM received", "Exception", "ERROR", "WARNING"):
        assert noise not in run.output, run.output
    summary = json.loads((run.folder / "summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("interrupted", "stopped by the user")
    for line in (run.folder / "rounds.jsonl").read_text().splitlines():
        assert json.loads(line)


@pytest.mark.slow
@SIGNALS
def test_a_run_with_two_workers(tmp_path: Path, how: str) -> None:
    with Foreground(tmp_path / "run", *ENDLESS, "engine.workers=2") as run:
        run.wait_until(run.has_rounds)
        assert len(run.processes()) == 4  # the run, its workers, and a guard of their folder
        interrupt(run, how)


@pytest.mark.slow
def test_workers_that_are_just_being_spawned(tmp_path: Path) -> None:
    """Ctrl-C meets them too, in the middle of their imports."""
    with Foreground(tmp_path / "run", *ENDLESS, "engine.workers=2", "engine.threads=2") as run:
        # The run, a guard, a tracker, and the first worker.
        run.wait_until(lambda: len(run.processes()) > 3)
        interrupt(run, "ctrl-c")


@pytest.mark.usefixtures("own_process")
@pytest.mark.parametrize(("number", "workers"), [(signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_the_record_of_an_interrupted_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    number: signal.Signals,
    workers: int,
) -> None:
    """In this process: a client sends the signal in step 2, and works on."""
    monkeypatch.setattr(logging.getLogger("fedhet"), "handlers", [])  # of other tests' streams
    here = os.getpid()

    def interrupting(
        plugin: FedNormPlugin, msg: Message, state: State, ctx: ClientContext
    ) -> list[Term]:
        if msg.step == 2 and msg.pid == 1:
            os.kill(here, number)
            time.sleep(600)
        return []

    monkeypatch.setattr(FedNormPlugin, "terms", interrupting)
    lines = ["method=fednorm", "rounds=4", "partition.clients=3", "model.hidden=[8]"]
    folder = tmp_path / "run"
    assert cli.main([*lines, f"engine.workers={workers}", f"hydra.run.dir={folder}"]) == 130
    out, err = capfd.readouterr()
    assert out.endswith(f"run folder: {folder}\n") and err.endswith("\ninterrupted\n")
    assert "Traceback" not in err
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("interrupted", "stopped by the user")
    assert len((folder / "rounds.jsonl").read_text().splitlines()) == 1
    assert not multiprocessing.active_children()


class Interrupted:
    """What Ctrl-C meets if it comes while Python cleans up, as it does after every import."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number

    def __del__(self) -> None:
        signal.raise_signal(self.number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("how", ["a finalizer", "an extension", "an error in its place"])
def test_an_interruption_that_a_library_drops(
    number: signal.Signals,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    steps = []

    def command(argv: object) -> int:
        clock = Clock()
        for step in range(3):
            with clock("step"):
                steps.append(step)
                if how == "a finalizer":
                    Interrupted(number)
                elif how == "an error in its place":  # as omegaconf that is stopped halfway
                    try:
                        signal.raise_signal(number)
                    except KeyboardInterrupt as error:
                        raise AttributeError("'NoneType' has no such attribute") from error
                else:  # numpy's do this when they are imported
                    with suppress(KeyboardInterrupt):
                        signal.raise_signal(number)
        return 0

    monkeypatch.setattr(cli, "_main", command)
    before = [signal.getsignal(one) for one in signal.Signals]
    for _ in range(2):
        steps.clear()
        assert cli.main([]) == 130
        assert steps == [0]
        assert capsys.readouterr().err == "interrupted\n"
    assert [signal.getsignal(one) for one in signal.Signals] == before


@pytest.fixture
def endless_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides with which a client trains for ever, after it has left a file in tmp_path/began."""
    (tmp_path / "began").mkdir()
    monkeypatch.setenv("FEDHET_TRUST", "faulty")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("FEDHET_TEST_FOLDER", str(tmp_path / "began"))
    # Ray must not join whatever cluster the machine knows; nothing listens there.
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    return [
        *ENDLESS,
        "plugin=[fednorm]",
        "plugin.fednorm._target_=faulty.Faulty",
        "plugin.fednorm.z_when=hang",
        "engine=ray",
    ]


@pytest.mark.matrix
@SIGNALS
def test_a_run_under_ray_with_a_client_that_trains(
    tmp_path: Path, endless_client: list[str], how: str
) -> None:
    with Foreground(tmp_path / "run", *endless_client) as run:
        run.wait_until(lambda: any((tmp_path / "began").iterdir()))
        assert any("raylet" in process.name() for process in run.processes())
        interrupt(run, how)


@pytest.mark.matrix
@pytest.mark.parametrize(("how", "process"), [("ctrl-c", "gcs_server"), ("sigterm", "raylet")])
def test_a_run_for_which_ray_is_just_being_started(tmp_path: Path, how: str, process: str) -> None:
    with Foreground(tmp_path / "run", *ENDLESS, "engine=ray") as run:
        run.wait_until(lambda: any(process in other.name() for other in run.processes()))
        interrupt(run, how)


@pytest.mark.matrix
def test_a_signal_that_meets_rays_workers_before_the_run(
    tmp_path: Path, endless_client: list[str]
) -> None:
    """As from a batch system, which sends it to all processes: no message is served again."""
    with Foreground(tmp_path / "run", *endless_client) as run:
        run.wait_until(lambda: any((tmp_path / "began").iterdir()))
        for process in run.processes():
            if "RayClients" in " ".join(process.cmdline()):
                process.terminate()
        run.wait_until(lambda: "A worker died" in run.output)
        run.terminate()
        assert run.end() == 130, run.output
        assert "retried" not in run.output
        summary = json.loads((run.folder / "summary.json").read_text())
        assert (summary["status"], summary["reason"]) == ("interrupted", "stopped by the user")


def terminate_worker(self: FedClient, msg: Broadcast) -> Reply:
    os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError


def test_a_signal_that_meets_a_worker_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a batch system, which sends it to all processes."""
    monkeypatch.setattr(FedClient, "handle", terminate_worker)
    monkeypatch.setattr(pool.time, "sleep", lambda seconds: signal.raise_signal(signal.SIGINT))
    job = Job(compose(["method=fedavg"]), toy_task(2))
    with PoolTransport(1, job, tmp_path) as transport, pytest.raises(KeyboardInterrupt):
        list(transport.exchange(job.strategy.plan(1).messages, Clock()))


@pytest.mark.timeout(60)
def test_what_flwr_run_has_started_ends_although_it_does_not_listen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a daemon that holds the pipe of `flwr run`, and ignores that it is to end."""
    in_place_of_flwr(tmp_path, monkeypatch)
    deaf = ["bash", "-c", "trap '' TERM; sleep 600 & echo started; wait"]

    def interrupted() -> None:
        raise KeyboardInterrupt

    temporary = TemporaryFolder("fedhet-test-")
    with temporary as folder:
        environment = {**os.environ, **temporary.environment}
        with pytest.raises(KeyboardInterrupt):
            flwr._submit(deaf, environment, interrupted, temporary.end_processes)
        variables = [process.info["environ"] or {} for process in psutil.process_iter(["environ"])]
        assert folder not in [some.get(TAG) for some in variables]


@pytest.mark.matrix
@SIGNALS
def test_a_run_through_flwr_run(tmp_path: Path, how: str) -> None:
    with Foreground(tmp_path / "run", *ENDLESS, "engine=flwr", "engine.workers=2") as run:
        run.wait_until(run.has_rounds)
        run.press_ctrl_c() if how == "ctrl-c" else run.terminate()
        assert run.end() == 130, run.output
        assert "Traceback" not in run.output
        summary = json.loads((run.folder / "summary.json").read_text())
        assert (summary["status"], summary["reason"]) == ("interrupted", "stopped by the user")
