"""A client whose state is lost: a failure each time, or a new beginning (on_lost_state)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedhet.core.errors import RunFailed
from fedhet.core.messages import LOST, Failure
from fedhet.core.server.evaluation import evaluation_messages, received
from fedhet.data.toy import toy_task
from fedhet.flower import wire
from fedhet.methods.ditto import Ditto
from fedhet.methods.scaffold import Scaffold
from fedhet.runs.stores import DiskStore

Launch = Callable[..., Any]


def wipe(folder: Path) -> None:
    shutil.rmtree(folder)


def damage(folder: Path) -> None:
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"?")


HOW = pytest.mark.parametrize("lose", [wipe, damage])


@pytest.fixture
def launch(federation: Launch, tmp_path: Path) -> Launch:
    """Makes a run whose clients keep their states in tmp_path."""

    def make(cls: type, **setup: Any) -> Any:
        run = federation(toy_task(3), cls, rounds=6, **setup)
        run.store = DiskStore(tmp_path)
        return run

    return make


def failed(run: Any) -> list[tuple[int, str]]:
    return [(failure.pid, failure.reason) for failure in run.current.failures]


@HOW
def test_by_default_the_run_stops_and_says_so(
    launch: Launch, tmp_path: Path, lose: Callable[[Path], None]
) -> None:
    run = launch(Scaffold)
    run.step()
    lose(tmp_path / "1")
    with pytest.raises(RunFailed, match=r"client 1 .*(missing|damaged)"):
        run.step()
    assert failed(run) == [(1, LOST)]


def test_a_client_that_is_only_left_out_fails_for_ever(launch: Launch, tmp_path: Path) -> None:
    run = launch(Scaffold, on_failure="skip")
    run.step()
    wipe(tmp_path / "1")
    for _ in range(3):
        run.step()
        assert failed(run) == [(1, LOST)]


@HOW
@pytest.mark.parametrize("on_failure", ["stop", "skip"])
def test_a_client_starts_afresh(
    launch: Launch, tmp_path: Path, lose: Callable[[Path], None], on_failure: str
) -> None:
    """It fails once; from then on it is like a client that has never taken part."""
    run = launch(Scaffold, on_failure=on_failure, on_lost_state="restart")
    run.step()
    lose(tmp_path / "1")
    run.step()
    assert failed(run) == [(1, LOST)]
    versions = {msg.pid: msg.version for msg in run.step()}
    assert versions == {0: 2, 1: 0, 2: 2}
    assert failed(run) == []
    assert run.strategy.run.versions == {0: 3, 1: 3, 2: 3}


@pytest.mark.parametrize("control", ["steps", "gradient"])
def test_scaffold_forgets_what_is_lost(launch: Launch, tmp_path: Path, control: str) -> None:
    """The server's sum is that of the c_i which the clients have."""
    run = launch(Scaffold, on_lost_state="restart", options={"control": control})
    run.step()
    wipe(tmp_path / "1")
    run.step()
    run.step()
    kept = [run.store.load(pid, 3) for pid in range(3)]
    for name, total in run.strategy.run.states["method"]["total"].items():
        expected = sum(state[f"scaffold.c_i/{name}"].double() for state in kept)
        torch.testing.assert_close(total, expected, rtol=1e-9, atol=1e-9)


def test_other_failures_still_stop_the_run(launch: Launch) -> None:
    run = launch(Scaffold, on_lost_state="restart")
    with pytest.raises(RunFailed, match=r"client 1 .*broken"):
        run.step(lambda plan, replies: [replies[0], Failure(1, "train", 1, "broken"), replies[2]])


def test_a_state_that_is_missing_in_an_evaluation(launch: Launch, tmp_path: Path) -> None:
    def evaluate(run: Any) -> list[int]:
        replies = [run.client().handle(msg) for msg in evaluation_messages(run.strategy)]
        return [update.pid for update in received(replies, run.strategy)]

    stops = launch(Ditto)
    stops.step()
    wipe(tmp_path / "1")
    with pytest.raises(RunFailed, match=r"client 1 .*'evaluate'"):
        evaluate(stops)
    restarts = launch(Ditto, on_lost_state="restart")
    restarts.step()
    wipe(tmp_path / "1")
    assert evaluate(restarts) == [0, 2]
    assert evaluate(restarts) == [0, 1, 2]
    assert restarts.strategy.run.versions == {0: 1, 2: 1}


def test_the_reason_travels_and_no_other_one_does(launch: Launch) -> None:
    run = launch(Scaffold, on_failure="skip")
    msg = run.step()[1]
    lost = Failure(msg.pid, msg.phase, msg.step, "gone", LOST)
    assert wire.read_reply(msg, wire.reply_arrays(msg, lost)) == lost
    for reason in ("outlier", "not awaited", ""):
        forged = Failure(msg.pid, msg.phase, msg.step, "gone", reason)
        reply = wire.read_reply(msg, wire.reply_arrays(msg, forged))
        assert isinstance(reply, Failure) and reply.reason == "unreadable"
