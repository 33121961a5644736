"""What listens to a run: when its callbacks are called, in which order, and what they can do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from fedhet.core.errors import ConfigError, RunFailed, WriteError
from fedhet.core.groups import Evaluation, Noise
from fedhet.core.messages import Broadcast, Upload
from fedhet.core.server.callbacks import Callback, Row
from fedhet.core.server.loop import Loop
from fedhet.core.workspace import Workspace
from fedhet.data.toy import toy_task
from fedhet.engines.local_transport import LocalTransport
from fedhet.methods.fedavg import FedAvg
from fedhet.runs.privacy.account import Account, release
from fedhet.runs.stores import MemoryStore


class Diary(Callback):
    """Notes every moment, with what it was about."""

    def __init__(self, moments: list[Any], name: str = "") -> None:
        self.moments = moments
        self._name = name

    def _note(self, moment: str, *about: Any) -> None:
        self.moments.append((self._name + moment, *about))

    def begun(self, loop: Loop) -> None:
        self._note("begun")

    def planned(self, loop: Loop, plan: list[Broadcast]) -> None:
        self._note("planned", plan[0].phase, len(plan))

    def accepted(self, loop: Loop, update: Upload) -> None:
        self._note("accepted", update.pid)

    def evaluated(self, loop: Loop, row: Row, updates: Sequence[Upload]) -> bool | None:
        self._note("evaluated", len(updates))
        return None

    def step_ended(self, loop: Loop, row: Row) -> None:
        self._note("settled", row["round"], row["accepted"])

    def ended(self, loop: Loop, status: str, error: BaseException | None) -> None:
        self._note("ended", status)


def run(federation: Callable[..., Any], *callbacks: Callback, **how: Any) -> Loop:
    how = {"rounds": 2, "evaluation": Evaluation(every=2), **how}
    made = federation(toy_task(2), FedAvg, **how)
    loop = Loop(made.strategy, callbacks)
    loop.run(LocalTransport(made.client, made.store))
    return loop


def test_the_moments_of_a_run(federation: Callable[..., Any]) -> None:
    """The clients evaluate after the second round; each callback hears of it before the next."""
    moments: list[Any] = []
    run(federation, Diary(moments), Diary(moments, "second "))
    firsts = [moment for moment in moments if not moment[0].startswith("second ")]
    assert firsts == [
        ("begun",),
        ("planned", "train", 2),
        ("accepted", 1),
        ("accepted", 0),
        ("settled", 1, 2),
        ("planned", "train", 2),
        ("accepted", 1),
        ("accepted", 0),
        ("planned", "evaluate", 2),
        ("accepted", 0),
        ("accepted", 1),
        ("evaluated", 2),
        ("settled", 2, 2),
        ("ended", "ok"),
    ]
    pairs = list(zip(moments[::2], moments[1::2], strict=True))
    assert all(second == (f"second {first[0]}", *first[1:]) for first, second in pairs)


def test_an_evaluation_can_end_the_phase(federation: Callable[..., Any]) -> None:
    class Enough(Callback):
        def evaluated(self, loop: Loop, row: Row, updates: Sequence[Upload]) -> bool:
            return loop.round == 2

    loop = run(federation, Enough(), rounds=5, evaluation=Evaluation())
    assert loop.round == 2
    assert [entry.rounds for entry in loop.method.timetable] == [2]


def test_a_callback_that_fails_ends_the_run_and_the_others_learn_of_it(
    federation: Callable[..., Any],
) -> None:
    class Full(Callback):
        def step_ended(self, loop: Loop, row: Row) -> None:
            raise RunFailed("the disk is full")

    moments: list[Any] = []
    with pytest.raises(RunFailed, match="disk is full"):
        run(federation, Full(), Diary(moments))
    assert moments[-1] == ("ended", "failed")
    assert ("settled", 1, 2) not in moments


def test_a_step_whose_evaluation_fails_is_told_like_any(federation: Callable[..., Any]) -> None:
    """Once, before the end, and to all, also where one of them fails there."""

    class Failing(Callback):
        def evaluated(self, loop: Loop, row: Row, updates: Sequence[Upload]) -> None:
            raise RunFailed("no validation samples")

        def step_ended(self, loop: Loop, row: Row) -> None:
            if row["round"] == 2:
                raise WriteError("the disk is full")

    moments: list[Any] = []
    with pytest.raises(WriteError, match="disk is full"):
        run(federation, Diary(moments), Failing(), Diary(moments, "second "))
    assert moments[-4:] == [
        ("settled", 2, 2),
        ("second settled", 2, 2),
        ("ended", "failed"),
        ("second ended", "failed"),
    ]


@pytest.mark.parametrize(
    ("error", "status"), [(RunFailed("no room"), "failed"), (KeyboardInterrupt(), "interrupted")]
)
def test_a_callback_that_fails_in_the_end(
    federation: Callable[..., Any], error: BaseException, status: str
) -> None:
    """The next one is told what the run has become, and the one before has been told already."""

    class Late(Callback):
        def ended(self, loop: Loop, status: str, problem: BaseException | None) -> None:
            raise error

    moments: list[Any] = []
    with pytest.raises(type(error)):
        run(federation, Diary(moments), Late(), Diary(moments, "second "))
    assert moments[-2:] == [("ended", "ok"), ("second ended", status)]


def test_what_callbacks_add_to_a_message_reaches_the_clients(
    federation: Callable[..., Any],
) -> None:
    class Adding(Callback):
        def planned(self, loop: Loop, plan: list[Broadcast]) -> None:
            for msg in plan:
                msg.extras = {**msg.extras, "added": msg.pid}

        def step_ended(self, loop: Loop, row: Row) -> None:
            assert row["bytes"]["down"]["added"] == 16

    loop = run(federation, Adding(), rounds=1)
    assert {msg.extras["added"] for msg in loop.plan} == {0, 1}


def test_noise_without_an_account_is_refused(federation: Callable[..., Any]) -> None:
    noised = federation(toy_task(2), FedAvg, noise=Noise(1.0))
    with pytest.raises(ConfigError, match=r"privacy\.noise=1 .*account"):
        Loop(noised.strategy)
    assert Loop(noised.strategy, [Account(Noise(1.0))])
    device = torch.device("cpu")
    with pytest.raises(ConfigError, match=r"privacy\.noise=1 .*account"):
        Workspace(toy_task(), device=device, seed=0, noise=Noise(1.0))
    assert Workspace(toy_task(), device=device, seed=0, noise=Noise(1.0), release=release)


def test_whoever_drives_the_loop_carries_its_messages(federation: Callable[..., Any]) -> None:
    """So one process can drive several runs at once, each step of one beside that of another."""
    runs = [federation(toy_task(2), FedAvg, rounds=3, seed=seed) for seed in (0, 1)]
    alone = [federation(toy_task(2), FedAvg, rounds=3, seed=seed).run() for seed in (0, 1)]
    steps = [Loop(one.strategy, evaluates=False).steps() for one in runs]
    requests = [next(one) for one in steps]
    for _ in range(3):
        for number, (one, generator) in enumerate(zip(runs, steps, strict=True)):
            plan, _ = requests[number]
            replies = [one.client().handle(msg) for msg in plan]
            try:
                requests[number] = generator.send(replies)
            except StopIteration:
                continue
    assert [one.sha256 for one in runs] == [one.sha256 for one in alone]


def test_a_store_is_the_transport_s(federation: Callable[..., Any]) -> None:
    store = MemoryStore()
    seen: list[Any] = []

    class Looking(Callback):
        def begun(self, loop: Loop) -> None:
            seen.append(loop.transport.store)

    made = federation(toy_task(2), FedAvg, rounds=1)
    Loop(made.strategy, [Looking()]).run(LocalTransport(made.client, store))
    assert seen == [store]
