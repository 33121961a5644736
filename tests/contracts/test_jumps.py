"""One reply that is far from all others, under the plain mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from contracts.runs import SHORT, rows, validated

from fedhet.core import trees
from fedhet.core.admission import Backup
from fedhet.core.client import FedClient
from fedhet.core.errors import RunFailed
from fedhet.core.groups import ReplyLimits
from fedhet.core.messages import Broadcast, Reply, Update
from fedhet.core.task import Task
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.scaffold import Scaffold
from fedhet.models import MLP

Launch = Callable[..., Any]
ALL = ["fraction=1", "on_failure=skip", "replies.max_lost=1"]


def scaled(factor: float, pid: int = 2) -> Callable[..., list[Reply]]:
    """Multiplies the change of one client's weights."""

    def alter(plan: list[Broadcast], replies: list[Reply]) -> list[Reply]:
        for msg, reply in zip(plan, replies, strict=True):
            if msg.pid == pid and isinstance(reply, Update):
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
        if msg.pid == pid and msg.round in rounds and isinstance(reply, Update) and reply.weights:
            weights = trees.map(lambda t: torch.full_like(t, size), reply.weights)
            reply = replace(reply, weights=weights)
        return reply

    monkeypatch.setattr(FedClient, "handle", handled)


def failures(run: Any) -> list[tuple[int, int, str]]:
    return [(f["round"], f["pid"], f["reason"]) for f in run.summary["failures"]]


@pytest.mark.parametrize(("factor", "accepted"), [(900, 4), (1100, 3)])
def test_a_change_is_compared_with_the_median_of_the_step_before(
    federation: Callable[..., Any], factor: float, accepted: int
) -> None:
    """The learning rate is tiny, so that all steps change the weights alike."""
    run = federation(toy_task(4), FedAvg, rounds=2, lr=1e-6, on_failure="skip")
    run.step()
    assert set(run.strategy.outliers.medians["train"]) == {"change"}
    run.step(scaled(factor))
    assert run.strategy.current.accepted == accepted
    assert [failure.pid for failure in run.strategy.current.failures] == [2] * (4 - accepted)


def test_the_first_step_and_a_limit_of_null_accept_any_change(
    federation: Callable[..., Any],
) -> None:
    for limit, steps in ((1000.0, 1), (None, 2)):
        run = federation(
            toy_task(4), FedAvg, rounds=2, lr=1e-6, replies=ReplyLimits(max_jump=limit)
        )
        for _ in range(steps):
            run.step(scaled(1e6))
        assert run.strategy.current.accepted == 4


def test_a_step_in_which_nothing_moves_is_no_bound(federation: Callable[..., Any]) -> None:
    run = federation(toy_task(4), FedAvg, rounds=2, lr=0.0)
    run.step()
    assert run.strategy.outliers.medians == {"train": {"change": 0.0}}
    run.step(lambda plan, replies: replies)
    assert run.strategy.current.accepted == 4


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
    """In the first step, where nothing is known yet; then the client is refused.

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
    assert [row["accepted"] for row in rows(run)] == [0, 4, 5]
    assert run.rounds["loss_clients_weighted"].max() < 10


def test_a_huge_extra_in_the_first_step_is_undone(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would spoil the next step only, so that no loss tells of it."""
    handle = FedClient.handle

    def handled(self: FedClient, msg: Broadcast) -> Reply:
        reply = handle(self, msg)
        if self.pid == 2 and msg.step == 1 and isinstance(reply, Update) and reply.weights:
            huge = trees.map(lambda t: torch.full_like(t, 1e6), reply.tree("scaffold.c_plus"))
            reply.extras["scaffold.c_plus"] = huge
        return reply

    monkeypatch.setattr(FedClient, "handle", handled)
    run = launch(*SHORT, *ALL, "method=scaffold", "eval.every=3", task=validated())
    assert failures(run) == [(1, 2, "outlier")]
    assert [row["accepted"] for row in rows(run)] == [0, 5, 5]


def test_a_step_that_is_undone_leaves_nothing_in_the_record(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Undone after the step, and after the clients' evaluation, which alone judges two clients."""
    lines = ["method=moon", "plugin=[fednorm]", "client.lr=.01"]
    for task in (validated(5), validated(2)):
        with monkeypatch.context() as patch:
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

    def failing(self: FedClient, *visit: Any) -> Update:
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
    attack(monkeypatch, {1}, trees.LARGEST)
    with pytest.raises(RunFailed, match=r"client 2 .*not finite"):
        launch(*SHORT, "fraction=1", task=deeper(validated()))


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
    versions = dict(plain.strategy.versions)
    plain.round += 1
    plan = plain.strategy.plan(2)
    backup = Backup(plain.strategy)
    replies = scaled(500.0)(plan, [plain.client().handle(msg) for msg in plan])
    plain.strategy.settle(replies)
    assert plain.sha256 != before
    told: list[Any] = []
    assert backup.undo(told.append)
    assert [failure.pid for failure in told] == [2]
    assert plain.sha256 == before and plain.strategy.versions == versions
