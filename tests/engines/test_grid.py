"""The transport through Flower's Grid.

Replies are late, early, missing or foreign, and nodes come and go. The grid is one in this process,
whose nodes serve messages with real clients.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fake_grid import OnGrid
from flwr.supercore.task_identity import TaskIdentity

from fedhet.data.toy import toy_task
from fedhet.errors import RunFailed
from fedhet.evaluation import evaluation_messages
from fedhet.flower import server as flower_server
from fedhet.messages import Failure, Update
from fedhet.methods.scaffold import Scaffold
from fedhet.server import Clock


@pytest.fixture(autouse=True)
def _flower(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message asks which task it belongs to, which Flower sets in a server's process."""
    for name, value in (("_task_id", 1), ("_run_id", 1), ("_node_id", 1)):
        monkeypatch.setattr(TaskIdentity, name, value)
    monkeypatch.setattr(flower_server, "FAR_SECONDS", (0.001, 0.001))


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
    replies = list(on_grid.courier.exchange(messages, Clock()))
    assert all(isinstance(reply, Update) and reply.metrics for reply in replies)


def test_an_error_of_flower_names_its_client(federation: Callable[..., Any]) -> None:
    on_grid = OnGrid(federation)
    on_grid.grid.errors = {2}
    replies = on_grid.step()
    assert isinstance(replies[2], Failure) and replies[2].reason == "no reply"
    assert "Node\\nUnavailable" in replies[2].cause and "1002" in replies[2].cause
    assert on_grid.run.strategy.current.accepted == 3


def test_what_flower_cannot_decode_costs_one_reply(federation: Callable[..., Any]) -> None:
    on_grid = OnGrid(federation)
    on_grid.grid.undecodable = {1}
    replies = on_grid.step()
    assert isinstance(replies[1], Failure) and replies[1].reason == "unreadable"
    assert "KeyError: 'array-chunk'" in replies[1].cause
    assert on_grid.run.strategy.current.accepted == 3


def test_a_reply_after_the_deadline_is_not_awaited(federation: Callable[..., Any]) -> None:
    """Nor does it count in the next round, when it arrives."""
    on_grid = OnGrid(federation, deadline=1.0)
    on_grid.grid.schedule = {1: 10**9}
    replies = on_grid.step()
    assert isinstance(replies[1], Failure) and replies[1].reason == "late"
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


def test_enough_replies_end_a_step(federation: Callable[..., Any]) -> None:
    on_grid = OnGrid(federation, enough=0.5)
    on_grid.grid.schedule = {0: 10**9, 3: 10**9}
    replies = on_grid.step()
    reasons = {pid: getattr(reply, "reason", None) for pid, reply in replies.items()}
    assert reasons == {0: "not awaited", 1: None, 2: None, 3: "not awaited"}


def test_an_old_reply_is_refused(federation: Callable[..., Any]) -> None:
    """A node that answers with what it has sent in the round before."""
    on_grid = OnGrid(federation)
    kept = {}

    def keep(pid: int, res: Any) -> Any:
        kept.setdefault(pid, res)
        return kept[pid] if pid == 2 else res

    on_grid.grid.alter = keep
    assert isinstance(on_grid.step()[2], Update)
    second = on_grid.step()[2]
    assert isinstance(second, Failure) and second.reason == "replayed"


def test_a_reply_that_comes_twice_counts_once(federation: Callable[..., Any]) -> None:
    once, twice = OnGrid(federation), OnGrid(federation)
    twice.grid.copies = 2
    for on_grid in (once, twice):
        on_grid.step()
        on_grid.step()
        assert on_grid.run.strategy.current.accepted == 4
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
    with pytest.raises(RunFailed, match=r"waited 0 s for nodes with partition-id \[3\]; 3 of 4"):
        OnGrid(federation, present=3).step()
    on_grid = OnGrid(federation, present=3, min_nodes=3)
    absent = on_grid.step()[3]
    assert isinstance(absent, Failure) and absent.cause == "its node has not joined"
    on_grid.join(3)  # it comes in time for the second round
    assert isinstance(on_grid.step()[3], Update)


def test_a_node_that_comes_back_under_another_id_is_known_again(
    federation: Callable[..., Any],
) -> None:
    on_grid = OnGrid(federation, min_nodes=1)
    on_grid.step()
    on_grid.leave(2)
    assert isinstance(on_grid.step()[2], Failure)
    on_grid.join(2, generation=1)
    assert isinstance(on_grid.step()[2], Update)


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
    assert on_grid.run.strategy.current.accepted == 3
    assert "the run goes on without it" in caplog.text and "\x1b" not in caplog.text
    early = OnGrid(federation, present=3)
    early.join(3).properties = properties
    with pytest.raises(RunFailed):
        early.step()


def test_a_backend_that_has_ended_ends_the_wait(federation: Callable[..., Any]) -> None:
    on_grid = OnGrid(federation)
    on_grid.grid.schedule = dict.fromkeys(range(4), 10**9)
    on_grid.run.strategy.nodes.ended = "the backend has ended"
    with pytest.raises(RunFailed, match="has ended"):
        on_grid.step()


def test_simulations_look_more_often_than_deployments() -> None:
    from flwr.superlink.grid import InMemoryGrid

    near: Any = InMemoryGrid.__new__(InMemoryGrid)
    far: Any = SimpleNamespace()
    assert flower_server._pause(near, 10, 0) == 0.02
    assert flower_server._pause(near, 1000, 0) == 0.2
    assert flower_server._pause(far, 10, 0) <= flower_server._pause(far, 10, 100)
