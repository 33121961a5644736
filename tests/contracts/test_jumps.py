"""One reply that is far from all others, under the plain mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from contracts.runs import SHORT, rows, validated, without_seconds
from contracts.short import SHORT as SHORT_PHASES

from fedhet.core import trees
from fedhet.core.client.client import FedClient
from fedhet.core.client.context import ClientContext
from fedhet.core.errors import RunFailed
from fedhet.core.groups import ReplyLimits
from fedhet.core.kernel import Client, Message, Result, State, serves
from fedhet.core.messages import Broadcast, Failure, Reply, Upload
from fedhet.core.server.admission import Backup, Outliers
from fedhet.core.task import Task
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.scaffold import Scaffold
from fedhet.models import MLP
from fedhet.testing import check_resume

Launch = Callable[..., Any]
ALL = ["fraction=1", "on_failure=skip", "replies.max_lost=1"]


def scaled(factor: float, pid: int = 2) -> Callable[..., list[Reply]]:
    """Multiplies the change of one client's weights."""

    def alter(plan: list[Broadcast], replies: list[Reply]) -> list[Reply]:
        for msg, reply in zip(plan, replies, strict=True):
            if msg.pid == pid and isinstance(reply, Upload):
                change = trees.Difference(reply.weights, msg.weights)
                moved = trees.add(msg.weights, change, factor)
                reply.weights = trees.cast(moved, reply.weights)
        return replies

    return alter


def attack(monkeypatch: pytest.MonkeyPatch, rounds: set[int], size: float, pid: int = 2) -> None:
    """Let a client send weights of this size in these rounds."""
    handle = FedClient.handle

    def handled(self: FedClient, msg: Broadcast) -> Reply:
        reply = handle(self, msg)
        if msg.pid == pid and msg.round in rounds and isinstance(reply, Upload) and reply.weights:
            weights = trees.map(lambda t: torch.full_like(t, size), reply.weights)
            reply = replace(reply, weights=weights)
        return reply

    monkeypatch.setattr(FedClient, "handle", handled)


def failures(run: Any) -> list[tuple[int, int, str]]:
    return [(f["round"], f["pid"], f["reason"]) for f in run.summary["failures"]]


def medians(run: Any) -> dict[str, dict[str, float]]:
    """What the server remembers of the norms in each phase's last step."""
    return Outliers.medians(run.strategy.run.states)


@pytest.mark.parametrize(("factor", "accepted"), [(900, 4), (1100, 3)])
def test_a_change_is_compared_with_the_median_of_the_step_before(
    federation: Callable[..., Any], factor: float, accepted: int
) -> None:
    """The learning rate is tiny, so that all steps change the weights alike."""
    run = federation(toy_task(4), FedAvg, rounds=2, lr=1e-6, on_failure="skip")
    run.step()
    assert set(medians(run)["train"]) == {"change"}
    run.step(scaled(factor))
    assert run.current.accepted == accepted
    assert [failure.pid for failure in run.current.failures] == [2] * (4 - accepted)


def test_the_first_step_and_a_limit_of_null_accept_any_change(
    federation: Callable[..., Any],
) -> None:
    for limit, steps in ((1000.0, 1), (None, 2)):
        run = federation(
            toy_task(4), FedAvg, rounds=2, lr=1e-6, replies=ReplyLimits(max_jump=limit)
        )
        for _ in range(steps):
            run.step(scaled(1e6))
        assert run.current.accepted == 4


def test_a_step_in_which_nothing_moves_is_no_bound(federation: Callable[..., Any]) -> None:
    run = federation(toy_task(4), FedAvg, rounds=2, lr=0.0)
    run.step()
    assert medians(run) == {"train": {"change": 0.0}}
    run.step(lambda plan, replies: replies)
    assert run.current.accepted == 4


def test_a_huge_reply_is_refused_and_the_result_is_that_of_the_others(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack(monkeypatch, {2}, trees.LARGEST)
    run = launch(*SHORT, *ALL, "client.lr=.01", task=validated())
    assert failures(run) == [(2, 2, "outlier")]
    assert [row["accepted"] for row in rows(run)] == [5, 4, 5]
    assert all(math.isfinite(row["loss_global"]) for row in rows(run))


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedgen", "fedavgm"])
@pytest.mark.parametrize("judge", ["server", "clients"])
@pytest.mark.parametrize("size", [trees.LARGEST, 1e6])
def test_a_step_that_one_reply_spoils_is_undone(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, method: str, judge: str, size: float
) -> None:
    """In the first step, which is taken again without it; in the second the client is refused.

    The loss of three layers is not finite with weights of the largest size, and is with others.
    """
    task = validated()
    if judge == "clients":
        task.test = None
    attack(monkeypatch, {1, 2}, size)
    deep = deeper(task)
    more = ["method.server_steps=2"] if method == "fedgen" else []
    run = launch(*SHORT, *ALL, f"method={method}", *more, "client.lr=.01", task=deep)
    assert run.summary["status"] == "ok"
    assert failures(run) == [(1, 2, "outlier"), (2, 2, "outlier")]
    assert [row["accepted"] for row in rows(run)] == [4, 4, 5]
    assert run.rounds["loss_clients_weighted"].max() < 10


def test_a_huge_extra_in_the_first_step_is_left_out(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would spoil the next step only, so that no loss tells of it."""
    handle = FedClient.handle

    def handled(self: FedClient, msg: Broadcast) -> Reply:
        reply = handle(self, msg)
        if self.pid == 2 and msg.step == 1 and isinstance(reply, Upload) and reply.weights:
            huge = trees.map(lambda t: torch.full_like(t, 1e6), reply.tree("scaffold.c_plus"))
            reply.extras["scaffold.c_plus"] = huge
        return reply

    monkeypatch.setattr(FedClient, "handle", handled)
    run = launch(*SHORT, *ALL, "method=scaffold", "eval.every=3", task=validated())
    assert failures(run) == [(1, 2, "outlier")]
    assert [row["accepted"] for row in rows(run)] == [4, 5, 5]


PHASES = {  # whose first step has an outlier
    "feddisk.density": [*SHORT_PHASES["feddisk"], "method=fednova", "plugin=[feddisk]"],
    "fedlex.explore": [*SHORT_PHASES["fedlex"], "method=fedlex"],
    "train": ["method=scaffold", "plugin=[fednorm,drift]"],
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("size", [10.0, 1e14])
def test_a_phases_first_step_is_taken_again_as_if_the_client_were_absent(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, phase: str, size: float
) -> None:
    """Whatever the phase sends, and whether or not it is evaluated."""
    runs = [
        launch(*SHORT, *ALL, *PHASES[phase], task=toy_task(5))
        for huge in (size, None)
        if not striking(monkeypatch, phase, huge)
    ]
    reasons = [[(f["phase"], f["pid"], f["reason"]) for f in r.summary["failures"]] for r in runs]
    assert reasons == [[(phase, 2, "outlier")], [(phase, 2, "failed")]]
    left_out = "bytes", "failures"
    assert without_seconds(runs[0], *left_out) == without_seconds(runs[1], *left_out)


def striking(patch: pytest.MonkeyPatch, phase: str, size: float | None) -> None:
    """Let client 2 send what is as large as this in the phase's first step; None: let it fail."""
    handle = FedClient.handle

    def handled(self: FedClient, msg: Broadcast) -> Reply:
        if msg.phase != phase or msg.step > 1 or msg.pid != 2:
            return handle(self, msg)
        if size is None:
            return Failure(msg.pid, msg.phase, msg.step, "it is absent")
        reply = handle(self, msg)
        assert isinstance(reply, Upload)
        huge = partial(torch.full_like, fill_value=size)
        reply.weights = trees.map(huge, reply.weights)
        for name, value in reply.extras.items():
            if isinstance(value, dict):
                reply.extras[name] = trees.map(huge, value)
        return reply

    patch.setattr(FedClient, "handle", handled)


def test_a_step_that_is_taken_again_goes_on_after_a_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    striking(monkeypatch, "feddisk.density", 10.0)
    check_resume(*SHORT, *ALL, *PHASES["feddisk.density"], "rounds=1", task=toy_task(5))


def test_an_outlier_of_a_first_step_ends_the_run_by_default(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With null there is no bound."""
    striking(monkeypatch, "feddisk.density", 1e6)
    lines = [*SHORT, "fraction=1", *PHASES["feddisk.density"], "rounds=1"]
    with pytest.raises(RunFailed, match=r"client 2 .*feddisk\.density.*\b30 .*median"):
        launch(*lines, task=toy_task(5))
    assert not failures(launch(*lines, "replies.max_jump=null", task=toy_task(5)))


@pytest.mark.parametrize(("size", "lost"), [(29.0, []), (31.0, [2])])
def test_thirty_times_the_median_of_the_step_itself(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, size: float, lost: list[int]
) -> None:
    """All replies judge, those too that come after it."""

    @serves
    def sized(self: Client, msg: Message, state: State, ctx: ClientContext) -> tuple[Result, State]:
        length = size if msg.pid == 2 else 1.0 + msg.pid / 100
        change = trees.map(lambda t: torch.zeros_like(t), msg.weights)
        name = next(iter(change))
        change[name].view(-1)[0] = length / 1.03
        return Result(trees.cast(trees.add(msg.weights, change), msg.weights)), state

    monkeypatch.setattr(Client, "train", sized)
    run = launch(*SHORT, *ALL, "rounds=1", task=toy_task(5))
    assert [pid for _, pid, _ in failures(run)] == lost


def test_a_step_that_is_undone_leaves_nothing_in_the_record(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Undone after the step, or after the clients' evaluation: of two clients, neither is usual."""
    lines = ["method=moon", "plugin=[fednorm]", "client.lr=.01"]
    for judge in ("server", "clients"):
        with monkeypatch.context() as patch:
            task = validated(2)
            if judge == "clients":
                task.test = None
            attack(patch, {1}, trees.LARGEST, pid=1)
            first, second, _ = rows(launch(*SHORT, *ALL, *lines, task=deeper(task)))
        assert (first["accepted"], first["metrics"]) == (0, {})
        assert first["client_state"]["clients"] == 0 < second["client_state"]["clients"]
        assert second["metrics"]
        assert {name for name in second if "fednorm." in name}
        assert not {name for name in first if "fednorm." in name}


def test_a_client_that_fails_both_evaluations_of_an_undone_step_has_failed_once(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = validated(2)
    task.test = None
    attack(monkeypatch, {1}, trees.LARGEST, pid=0)
    assess = FedClient.assess

    def failing(self: FedClient, *visit: Any) -> Upload:
        if self.pid == 1:
            raise OSError("the disk is full")
        return assess(self, *visit)

    monkeypatch.setattr(FedClient, "assess", failing)
    run = launch(*SHORT, *ALL, "method=fedavg", "client.lr=.01", task=deeper(task))
    first = [(f["phase"], f["pid"]) for f in run.summary["failures"] if f["round"] == 1]
    assert sorted(first) == [("evaluate", 1), ("train", 0)]


def deeper(task: Task) -> Task:
    """With a model of three layers, whose outputs overflow where its weights are huge."""
    shape = tuple(task.clients[0].train.x.shape[1:])

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return MLP(shape=shape, classes=task.classes, hidden=[8, 8])

    return Task(model, task.criterion, task.clients, task.test, task.classes)


def test_where_the_run_stops_at_a_failure_it_names_the_client(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack(monkeypatch, {1}, trees.LARGEST, pid=1)
    with pytest.raises(RunFailed, match=r"client 1 .*finite"):
        launch(*SHORT, "fraction=1", task=deeper(validated(2)))


@pytest.mark.parametrize("lr", [1e4, 1e30])
def test_a_method_that_diverges_by_itself_diverges_as_before(launch: Launch, lr: float) -> None:
    """All replies jump alike, so that none is refused for it and no step is undone."""
    lines = [*SHORT, *ALL, f"client.lr={lr}", "rounds=6"]
    if lr == 1e4:
        run = launch(*lines, task=deeper(validated()))
        assert failures(run) == []
        assert run.rounds["loss_global"].max() > 1e6
        return
    with pytest.raises(RunFailed, match="NaN or infinite"):
        launch(*lines, task=deeper(validated()))


def test_undoing_restores_what_the_server_remembers(federation: Callable[..., Any]) -> None:
    """The run goes on as if the step had not been; what its clients have put away is ignored."""
    plain = federation(toy_task(4), Scaffold, rounds=3, on_failure="skip")
    plain.step()
    before = plain.sha256
    versions = dict(plain.strategy.run.versions)
    backup = Backup(plain.strategy, 2)
    plan = plain.plan()
    replies = scaled(500.0)(plan, [plain.client().handle(msg) for msg in plan])
    plain.finish_step(replies)
    assert plain.sha256 != before
    told: list[Any] = []
    assert backup.undo(plain.current, told.append)
    assert [failure.pid for failure in told] == [2]
    assert plain.sha256 == before and plain.strategy.run.versions == versions
