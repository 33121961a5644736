"""No client can hold up a run: whoever hangs is given up, and too few replies change nothing."""

from __future__ import annotations

import ctypes
import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedhet
from fedhet.__main__ import main
from fedhet.core import interruptions
from fedhet.core.client.context import ClientContext
from fedhet.core.errors import RunFailed
from fedhet.core.groups import ReplyLimits
from fedhet.core.kernel import Message, State, Term
from fedhet.core.messages import Broadcast, Failure
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fednorm import FedNormPlugin

LINES = [
    "method=fednorm",
    "rounds=2",
    "eval.clients=false",
    "client.lr=.1",
    "on_failure=skip",
    "replies.max_lost=1",
    "figures=false",
]


# ---- the time limit itself


def in_main(work: Callable[[], None]) -> None:
    work()


def in_thread(work: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 -- handed to the test
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("where", [in_main, in_thread])
def test_a_time_limit_ends_what_runs_too_long(where: Callable[..., None]) -> None:
    """Also where the work catches every Exception."""
    ended = []

    def hang() -> None:
        with interruptions.time_limit(0.1):
            while True:
                try:
                    time.sleep(0.01)
                except Exception:  # noqa: BLE001 -- as careless code does
                    ended.append("caught")

    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"longer .* 0.1 s"):
        where(hang)
    assert time.monotonic() - began < 10 and not ended


@pytest.mark.parametrize("where", [in_main, in_thread])
def test_a_time_limit_leaves_quick_work_alone(where: Callable[..., None]) -> None:
    def work() -> None:
        for _ in range(20):
            with interruptions.time_limit(0.05):
                pass
        time.sleep(0.1)

    before = signal.getsignal(signal.SIGALRM)
    where(work)
    assert signal.getsignal(signal.SIGALRM) is before


# ---- clients that hang


def hangs(plugin: FedNormPlugin, msg: Message, state: State, ctx: ClientContext) -> list[Term]:
    """In place of `terms`: client 3 hangs in step 1, asleep or in C, where no exception gets."""
    if msg.pid == 3 and msg.step == 1:
        if plugin.z_when == "before_training":
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
            ctypes.CDLL(None).sleep(600)
        time.sleep(600)
    return []


@pytest.mark.parametrize(
    ("workers", "how"), [(1, "asleep"), (2, "asleep"), (2, "before_training")], ids=str
)
def test_a_client_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, how: str
) -> None:
    """It is left out; the other clients' replies and the next round are whole."""
    monkeypatch.setattr(FedNormPlugin, "terms", hangs)
    lines = [
        *LINES,
        "replies.deadline=1",
        f"replies.grace={2 if how == 'asleep' else 0.5}",  # who is asleep ends by itself
        f"engine.workers={workers}",
        f"hydra.run.dir={tmp_path / 'run'}",
    ]
    if how == "before_training":
        lines.append("plugin.fednorm.z_when=before_training")
    run = fedhet.run(lines, task=toy_task(5))
    rows = [json.loads(line) for line in (run.dir / "rounds.jsonl").read_text().splitlines()]
    assert [(row["accepted"], len(row["cohort"])) for row in rows] == [(4, 5), (5, 5)]
    (failure,) = run.summary["failures"]
    assert failure["pid"] == 3 and "1 s" in failure["cause"]
    assert run.summary["rejected"] == {failure["reason"]: 1}
    assert failure["reason"] == ("late" if how == "before_training" else "failed")


# ---- too few replies


def replies_of(count: int) -> Callable[..., Any]:
    """Only so many clients reply."""

    def alter(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        return [
            reply if i < count else Failure(reply.pid, "train", 1, "gone", "no reply")
            for i, reply in enumerate(replies)
        ]

    return alter


def test_too_few_replies_change_nothing(federation: Callable[..., Any]) -> None:
    limits = ReplyLimits(least=3, bad_steps=1)
    run = federation(toy_task(4), FedAvg, on_failure="skip", rounds=6, replies=limits)
    before = run.sha256
    run.step(alter=replies_of(2))
    assert run.sha256 == before and run.current.accepted == 0
    run.step(alter=replies_of(3))
    changed = run.sha256
    assert changed != before and run.current.accepted == 3
    run.step(alter=replies_of(0))  # one bad step in a row is allowed again
    assert run.sha256 == changed
    with pytest.raises(RunFailed, match=r"2 .*least 3 replies.*replies\.least"):
        run.step(alter=replies_of(2))


def test_a_client_of_a_step_that_changed_nothing_has_its_old_state(
    federation: Callable[..., Any],
) -> None:
    """The step counts as not having happened, for SCAFFOLD's control variates as well."""
    from fedhet.methods.scaffold import Scaffold

    limits = ReplyLimits(least=3, bad_steps=1)
    disturbed = federation(toy_task(4), Scaffold, on_failure="skip", rounds=9, replies=limits)
    disturbed.step()
    versions = dict(disturbed.strategy.run.versions)
    disturbed.step(alter=replies_of(2))
    assert disturbed.strategy.run.versions == versions


def test_a_degraded_run_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `degraded` in its summary and by exit code 3; a run that may lose more is fine."""

    def fails(plugin: FedNormPlugin, msg: Message, state: State, ctx: ClientContext) -> list[Term]:
        if msg.pid in (1, 2):
            raise OSError("battery")
        return []

    monkeypatch.setattr(FedNormPlugin, "terms", fails)
    lines = ["rounds=1", "eval.clients=false", "on_failure=skip", "client.epochs=1"]
    lines += ["figures=false", "model.hidden=[8]"]
    assert main([*lines, f"hydra.run.dir={tmp_path / 'a'}"]) == 3
    assert "replies.max_lost" in capfd.readouterr().err
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["degraded"] is True and summary["status"] == "ok"
    assert summary["rejected"] == {"failed": 2}
    assert main([*lines, f"hydra.run.dir={tmp_path / 'b'}", "replies.max_lost=.2"]) == 0
    assert json.loads((tmp_path / "b" / "summary.json").read_text())["degraded"] is False


def test_oversampling_asks_more_clients(federation: Callable[..., Any]) -> None:
    limits = ReplyLimits(oversample=0.5)
    run = federation(toy_task(8), FedAvg, fraction=0.5, rounds=1, replies=limits)
    usual = federation(toy_task(8), FedAvg, fraction=0.5, rounds=1)
    asked, expected = ([msg.pid for msg in one.step()] for one in (run, usual))
    assert len(asked) == 6 and set(expected) < set(asked)
    assert limits.enough_of(6) == 4
