"""Ray's workers die, are lost with their machines, join, and carry states; Ray itself is a fake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock

import pytest
import ray
import torch
from ray.exceptions import ObjectLostError, RayActorError

from fedhet.core.errors import LostState, RunFailed
from fedhet.core.messages import Failure, Reply, Upload
from fedhet.core.server.loop import Clock
from fedhet.data.toy import toy_task
from fedhet.engines import pool
from fedhet.engines.ray import BATCH, ClientStates, RayTransport, SentStates, _packed, _unpacked
from fedhet.runs.config import compose
from fedhet.runs.job import Job


@dataclass(eq=False)
class Call:
    """A call of a worker, which serves these clients."""

    node: str
    pids: list[int]
    dead: bool = False


@dataclass
class FakeRay:
    """A cluster whose machines have one processor each.

    Attributes:
        nodes: the machines.
        when_called: is called before each call; may mark the call's process as dead.
        calls: all calls so far.
    """

    nodes: list[str]
    when_called: Callable[[Call], None] = lambda call: None
    calls: list[Call] = field(default_factory=list)

    def actor(self, node: str) -> Mock:
        def serve(visits: list[Any], weights: dict[int, Any]) -> list[Any]:
            self.calls.append(Call(node, [msg.pid for msg, _, _ in visits], worker.dead))
            self.when_called(self.calls[-1])
            worker.dead = self.calls[-1].dead
            return [self.calls[-1], *(object() for _ in visits)]

        worker = Mock(dead=False)
        worker.serve.options.return_value.remote.side_effect = serve
        return worker

    def get(self, refs: list[Any]) -> list[Any]:
        call = refs[0]
        if call.dead or call.node not in self.nodes:
            raise RayActorError
        return [[(Upload(pid, 1), [], []) for pid in call.pids]]

    def run(self, clients: int, steps: int = 1) -> tuple[RayTransport, list[Reply]]:
        transport = RayTransport(Job(compose(["method=fedavg", "engine=ray"]), toy_task(clients)))
        plan = transport_plan(clients)
        for _ in range(steps):
            replies = list(transport.exchange(plan, Clock()))
        assert [reply.pid for reply in replies] == [msg.pid for msg in plan]
        return transport, replies


def transport_plan(clients: int) -> list[Any]:
    return Job(compose(["method=fedavg"]), toy_task(clients)).strategy.plan(1).messages


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay(["a", "b"])

    def options(scheduling_strategy: Any) -> Mock:
        return Mock(remote=lambda *_: fake.actor(scheduling_strategy))

    where = "fedhet.engines.ray.NodeAffinitySchedulingStrategy"
    monkeypatch.setattr(where, lambda node, soft: node)
    monkeypatch.setattr(ray, "remote", lambda **_: lambda cls: Mock(options=options))
    machine = {"Alive": True, "Resources": {"CPU": 1.0}}
    monkeypatch.setattr(ray, "nodes", lambda: [{**machine, "NodeID": n} for n in fake.nodes])
    monkeypatch.setattr(ray, "put", lambda value: value)
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    monkeypatch.setattr(ray, "wait", lambda refs, timeout: (refs, []))
    monkeypatch.setattr(ray, "get", fake.get)
    monkeypatch.setattr(pool.time, "sleep", lambda seconds: None)
    return fake


def test_a_process_that_dies_costs_its_client_and_is_replaced(cluster: FakeRay) -> None:
    """No message is served again."""

    def die(call: Call) -> None:
        call.dead = True

    cluster.when_called = die
    transport, replies = cluster.run(2)
    assert all("process died" in reply.cause for reply in replies if isinstance(reply, Failure))
    assert [call.pids for call in cluster.calls] == [[reply.pid] for reply in replies]
    assert len(transport._workers) == 2


def test_another_machine_serves_the_clients_of_a_lost_one(cluster: FakeRay) -> None:
    """And one that joins is used from the next step on."""

    def lose(call: Call) -> None:
        if call.node == "b":
            cluster.nodes[:] = ["a"]
        elif len(cluster.calls) == 4:  # the last call of the first step
            cluster.nodes.append("c")

    cluster.when_called = lose
    transport, replies = cluster.run(3, steps=2)
    assert all(isinstance(reply, Upload) for reply in replies)
    assert sorted(transport._nodes[worker] for worker in transport._workers) == ["a", "c"]
    assert "c" in {call.node for call in cluster.calls[4:]}


def test_the_run_ends_if_all_machines_are_lost(cluster: FakeRay) -> None:
    cluster.when_called = lambda call: cluster.nodes.clear()
    with pytest.raises(RunFailed, match=r"processes .*clients .*lost"):
        cluster.run(2)


def test_a_process_that_dies_with_several_clients_costs_only_the_one_at_fault(
    cluster: FakeRay,
) -> None:
    def die(call: Call) -> None:
        call.dead = 0 in call.pids

    cluster.when_called = die
    cluster.nodes = ["a"]
    _, replies = cluster.run(2 * BATCH)
    assert len(cluster.calls[0].pids) > 1
    failed = [reply.pid for reply in replies if isinstance(reply, Failure)]
    assert failed == [0]


# ---- states
@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(3, 4),
        torch.rand(3, 4).t(),
        torch.rand(3).bfloat16(),
        torch.tensor(2.0, dtype=torch.float64),
        torch.tensor([True, False]),
        torch.empty(0, 2),
        torch.rand(2, requires_grad=True),
    ],
)
def test_a_tensor_comes_back_as_a_copy(tensor: torch.Tensor) -> None:
    content, *form = _packed(tensor)
    content.flags.writeable = False  # as in Ray's object store
    back = _unpacked((content, *form))
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(back, tensor)
    back.fill_(0)
    assert torch.equal(_unpacked((content, *form)), tensor)


def test_a_store_keeps_the_states_that_it_must(cluster: FakeRay) -> None:
    assert ClientStates().load(0, 1) is None
    states = SentStates({(0, 1): "one", (0, 2): "two", (-1, 0): "count"})
    tensor = torch.zeros(1)
    states.save(0, 3, {"t": tensor}, {2})
    tensor.fill_(1)
    assert [*states.refs] == [(0, 2), (-1, 0)]
    assert [*states.new] == [(0, 3)]
    assert states.load(0, 3) == {"t": torch.zeros(1)}
    assert states.load(0, 1) is None


def test_a_state_whose_machine_is_lost_is_a_lost_state(
    cluster: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(ref: Any) -> Any:
        raise ObjectLostError("00", "", "")

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(LostState, match=r"client 4.* round 2"):
        SentStates({(4, 2): "ref"}).load(4, 2)
