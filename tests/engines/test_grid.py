"""The transport through Flower's Grid.

Replies are late, early, missing or foreign, and nodes come and go. The grid is one in this process,
whose nodes serve messages with real clients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from fake_grid import OnGrid
from flwr.supercore.task_identity import TaskIdentity

from fedhet.core.errors import RunFailed
from fedhet.core.groups import ReplyLimits
from fedhet.core.messages import Failure, Upload
from fedhet.core.server.evaluation import evaluation_messages
from fedhet.core.server.loop import Clock
from fedhet.data.toy import toy_task
from fedhet.flower import nodes
from fedhet.flower import transport as flower_server
from fedhet.methods.scaffold import Scaffold


@pytest.fixture(autouse=True)
def _flower(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message asks which task it belongs to, which Flower sets in a server's process."""
    for name, value in (("_task_id", 1), ("_run_id", 1), ("_node_id", 1)):
        monkeypatch.setattr(TaskIdentity, name, value)
    monkeypatch.setattr(flower_server, "FAR_SECONDS", (0.001, 0.001))
    monkeypatch.setattr(flower_server, "START_SECONDS", 0.25)


def test_the_weights_are_those_of_clients_in_this_process(federation: Callable[..., Any]) -> None:
    """Whatever the order in which replies arrive."""
    expected = federation(toy_task(4), Scaffold, on_failure="skip", rounds=5)
    for schedule in ({}, {0: 4, 1: 3, 2: 2}, {3: 5}):
        on_grid = OnGrid(federation)
        on_grid.grid.schedule = schedule
        on_grid.step()
        if expected.round == 0:
            expected.step()
        assert on_grid.run.sha256 == expected.sha256


def test_evaluations_travel_too(federation: Callable[..., Any]) -> None:
    on_grid = OnGrid(federation)
    on_grid.step()
    messages = evaluation_messages(on_grid.run.strategy)
    replies = list(on_grid.transport.exchange(messages, Clock()))
    assert all(isinstance(reply, Upload) and reply.metrics for reply in replies)


def test_an_error_of_flower_names_its_client(federation: Callable[..., Any]) -> None:
    on_grid = OnGrid(federation)
    on_grid.grid.errors = {2}
    replies = on_grid.step()
    assert isinstance(replies[2], Failure) and replies[2].reason == "no reply"
    assert "Node\\nUnavailable" in replies[2].cause and "1002" in replies[2].cause
    assert on_grid.run.current.accepted == 3


def test_what_flower_cannot_decode_costs_one_reply(federation: Callable[..., Any]) -> None:
    on_grid = OnGrid(federation)
    on_grid.grid.undecodable = {1}
    replies = on_grid.step()
    assert isinstance(replies[1], Failure) and replies[1].reason == "unreadable"
    assert "KeyError: 'array-chunk'" in replies[1].cause
    assert on_grid.run.current.accepted == 3


def test_a_reply_after_the_deadline_is_not_awaited(federation: Callable[..., Any]) -> None:
    """Nor does it count in the next round, when it arrives."""
    on_grid = OnGrid(federation, deadline=1.0)
    on_grid.grid.schedule = {1: 10**9}
    replies = on_grid.step()
    assert isinstance(replies[1], Failure) and replies[1].reason == "late"
    assert "replies.deadline=1, and replies.grace=0, and 0.25 s to start" in replies[1].cause
    on_grid.grid.schedule = {}
    replies = on_grid.step()
    assert not [reply for reply in replies.values() if isinstance(reply, Failure)]
    undisturbed = federation(toy_task(4), Scaffold, on_failure="skip", rounds=5)
    undisturbed.step(
        alter=lambda plan, replies: [
            Failure(1, "train", 1, "") if reply.pid == 1 else reply for reply in replies
        ]
    )
    undisturbed.step()
    assert on_grid.run.sha256 == undisturbed.sha256


def test_a_message_expires_when_its_reply_is_not_awaited_any_more(
    federation: Callable[..., Any],
) -> None:
    """A node that was cut off would otherwise work off all that it has missed, and stay late."""
    on_grid = OnGrid(federation, deadline=30.0, grace=10.0)
    on_grid.step()
    on_grid.step()
    # The start does not count; five seconds more, in case of another clock.
    assert on_grid.grid.lives == [45.25] * 4 + [45.0] * 4
    without = OnGrid(federation)
    without.step()
    assert min(without.grid.lives) > 3600


@pytest.mark.parametrize(
    ("nodes", "start", "expected"),
    [
        ([7, 8], False, (50, "replies.deadline=40, and replies.grace=10")),
        ([7, 8], True, (50.25, "replies.deadline=40, and replies.grace=10, and 0.25 s to start")),
        (
            [7, 7, 8],
            False,
            (90, "replies.deadline=40 for each of its 2 clients, and replies.grace=10"),
        ),
    ],
)
def test_how_long_a_reply_is_awaited_is_said_by_the_settings(
    nodes: list[int], start: bool, expected: tuple[float, str]
) -> None:
    assert flower_server._awaited(ReplyLimits(deadline=40.0), nodes, start) == expected


@pytest.mark.parametrize("deadline", [None, 60.0])
def test_the_log_says_that_a_run_waits_for_any_time_and_for_whom(
    federation: Callable[..., Any],
    deadline: float | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(flower_server, "PATIENCE", 0.02)
    on_grid = OnGrid(federation, deadline=deadline)
    on_grid.grid.schedule = {1: 600, 3: 600}
    with caplog.at_level(logging.INFO, "fedhet"):
        on_grid.step()
        on_grid.step()
    assert caplog.text.count("replies.deadline=null") == (deadline is None)
    assert "waiting for the replies of clients [1, 3], on nodes with partition-id [1, 3]" in (
        caplog.text
    )


def test_enough_replies_end_a_step(federation: Callable[..., Any]) -> None:
    on_grid = OnGrid(federation, enough=0.5)
    on_grid.grid.schedule = {0: 10**9, 3: 10**9}
    replies = on_grid.step()
    reasons = {pid: getattr(reply, "reason", None) for pid, reply in replies.items()}
    assert reasons == {0: "not awaited", 1: None, 2: None, 3: "not awaited"}


def test_failures_are_not_enough(federation: Callable[..., Any]) -> None:
    """Clients that fail at once do not shorten the wait for those that train."""
    on_grid = OnGrid(federation, enough=0.5)
    on_grid.grid.errors = {0, 1}
    on_grid.grid.schedule = {2: 3, 3: 6}
    replies = on_grid.step()
    reasons = {pid: getattr(reply, "reason", None) for pid, reply in replies.items()}
    assert reasons == {0: "no reply", 1: "no reply", 2: None, 3: None}


def test_an_old_reply_is_refused(federation: Callable[..., Any]) -> None:
    """A node that answers with what it has sent in the round before."""
    on_grid = OnGrid(federation)
    kept = {}

    def keep(pid: int, res: Any) -> Any:
        kept.setdefault(pid, res)
        return kept[pid] if pid == 2 else res

    on_grid.grid.alter = keep
    assert isinstance(on_grid.step()[2], Upload)
    second = on_grid.step()[2]
    assert isinstance(second, Failure) and second.reason == "replayed"


def test_a_reply_that_comes_twice_counts_once(federation: Callable[..., Any]) -> None:
    once, twice = OnGrid(federation), OnGrid(federation)
    twice.grid.copies = 2
    for on_grid in (once, twice):
        on_grid.step()
        on_grid.step()
        assert on_grid.run.current.accepted == 4
    assert once.run.sha256 == twice.run.sha256


def test_a_reply_in_the_name_of_another_client_is_refused(federation: Callable[..., Any]) -> None:
    on_grid = OnGrid(federation)
    own: dict[int, Any] = {}

    def impersonate(pid: int, res: Any) -> Any:
        own[pid] = res
        return own.get(3, res) if pid == 2 else res

    on_grid.grid.alter = impersonate
    on_grid.grid.schedule = {2: 2}
    reply = on_grid.step()[2]
    assert isinstance(reply, Failure) and reply.reason == "replayed"


# ---- nodes that come and go


def test_a_run_begins_without_some_nodes_only_if_it_may(federation: Callable[..., Any]) -> None:
    with pytest.raises(RunFailed, match=r"partition-id \[3\].*3 .*4"):
        OnGrid(federation, present=3).step()
    on_grid = OnGrid(federation, present=3, min_nodes=3)
    absent = on_grid.step()[3]
    assert isinstance(absent, Failure) and absent.cause == "its node is not connected"
    on_grid.join(3)  # it comes in time for the second round
    assert isinstance(on_grid.step()[3], Upload)
    on_grid.leave(3)
    left = on_grid.step()[3]
    assert isinstance(left, Failure) and left.cause == "its node is not connected"


def test_a_node_that_comes_back_under_another_id_is_known_again(
    federation: Callable[..., Any],
) -> None:
    on_grid = OnGrid(federation, min_nodes=1)
    on_grid.step()
    on_grid.leave(2)
    assert isinstance(on_grid.step()[2], Failure)
    on_grid.join(2, generation=1)
    assert isinstance(on_grid.step()[2], Upload)


@pytest.mark.parametrize(
    "properties",
    [
        {},
        {"partition-id": 2, "num-partitions": 4},
        {"partition-id": 9, "num-partitions": 4},
        {"partition-id": -1, "num-partitions": 4},
        {"partition-id": "2", "num-partitions": 4},
        {"partition-id": True, "num-partitions": 4},
        {"partition-id": 3, "num-partitions": 10**9},
        {"partition-id": "\x1b[2J", "num-partitions": 4},
    ],
)
def test_a_strange_node_ends_no_run_that_has_begun(
    federation: Callable[..., Any],
    properties: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Before the run it is a mistake of whoever set up the nodes, and reported as such."""
    on_grid = OnGrid(federation, present=3, min_nodes=3)
    on_grid.step()
    on_grid.join(3, generation=4).properties = properties
    on_grid.step()
    assert on_grid.run.current.accepted == 3
    assert "the run continues without this node" in caplog.text and "\x1b" not in caplog.text
    early = OnGrid(federation, present=3)
    early.join(3).properties = properties
    with pytest.raises(RunFailed):
        early.step()


def test_a_node_whose_answer_is_lost_is_asked_again(
    federation: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The others are asked once, and an answer that arrives after all changes nothing."""
    monkeypatch.setattr(flower_server, "AGAIN_SECONDS", 0.5)
    on_grid = OnGrid(federation, present=3)
    others = list(on_grid.grid.nodes.values())
    silent = on_grid.join(3)
    silent.lost = 1
    with caplog.at_level("INFO", "fedhet"):
        assert all(isinstance(reply, Upload) for reply in on_grid.step().values())
    assert len(silent.asked) == 2 and caplog.text.count("asking 1 of 4 nodes again") == 1
    silent.found = True
    assert all(isinstance(reply, Upload) for reply in on_grid.step().values())
    assert [len(node.asked) for node in others] == [1, 1, 1] and len(silent.asked) == 2


def test_a_node_that_leaves_while_it_is_asked_is_awaited(federation: Callable[..., Any]) -> None:
    """Before the run as any other that is missing; it is asked again when it is back."""
    on_grid = OnGrid(federation, present=3, min_nodes=3)
    on_grid.join(3).leaves = True
    assert isinstance(on_grid.step()[3], Failure)
    on_grid.join(3)
    assert isinstance(on_grid.step()[3], Upload)


def test_a_node_that_never_answers_is_named(
    federation: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(flower_server, "AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(nodes, "ASK_SECONDS", 0.2)
    on_grid = OnGrid(federation, present=3)
    silent = on_grid.join(3)
    silent.lost = 10**9
    with pytest.raises(RunFailed, match=f"node {silent.node_id}: .*answer within 0.2 s"):
        on_grid.step()
    begun = OnGrid(federation, present=3, min_nodes=3)
    begun.step()
    begun.join(3).lost = 10**9
    assert isinstance(begun.step()[3], Failure)
    assert "no answer within 0.2 s" in caplog.text


def test_simulations_look_more_often_than_deployments() -> None:
    near, far = (
        Mock(run=SimpleNamespace(primary_task_type=f"flwr-{kind}"))
        for kind in ("simulation", "serverapp")
    )
    assert flower_server.pause_of(near, 10, 0) == 0.02
    assert flower_server.pause_of(near, 1000, 0) == 0.2
    assert flower_server.pause_of(far, 10, 0) <= flower_server.pause_of(far, 10, 100)


def test_the_digest_of_the_runs_app_is_logged_with_its_first_messages(
    federation: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    on_grid = OnGrid(federation)
    vars(on_grid.grid)["run"] = SimpleNamespace(fab_hash="0123")
    caplog.set_level("INFO", "fedhet")
    for _ in range(2):
        on_grid.step()
    assert caplog.messages.count("the app of this run has the SHA-256 0123") == 1
