"""Ctrl-C and SIGTERM end a run at once: one line, its record, no process left."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from foreground import Foreground, last_lines

from fedhet.cli import main as cli
from fedhet.messages import Broadcast
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.server import Clock

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
    here = os.getpid()
    prepare = FedNormPlugin.prepare

    def interrupting(plugin: FedNormPlugin, msg: Broadcast) -> None:
        prepare(plugin, msg)
        if msg.step == 2 and plugin.client.pid == 1:
            os.kill(here, number)
            time.sleep(600)

    monkeypatch.setattr(FedNormPlugin, "prepare", interrupting)
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
@pytest.mark.parametrize("how", ["a finalizer", "an extension"])
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
def test_a_run_through_flwr_run(tmp_path: Path) -> None:
    with Foreground(tmp_path / "run", *ENDLESS, "engine=flwr", "engine.workers=2") as run:
        run.wait_until(run.has_rounds)
        run.press_ctrl_c()
        assert run.end() == 130, run.output
        assert "Traceback" not in run.output
        summary = json.loads((run.folder / "summary.json").read_text())
        assert (summary["status"], summary["reason"]) == ("interrupted", "stopped by the user")
