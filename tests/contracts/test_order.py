"""Neither the order in which clients are served nor that in which replies arrive moves a bit."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.client import Client
from flwr.common import (
    Code,
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    GetPropertiesIns,
    GetPropertiesRes,
    Status,
    ndarrays_to_parameters,
)
from flwr.server import Server
from flwr.server.client_manager import SimpleClientManager
from flwr.server.client_proxy import ClientProxy
from torch import nn

from fedhet.data.toy import toy_task
from fedhet.evaluation import global_scores
from fedhet.flower import wire
from fedhet.flower.nodes import Nodes
from fedhet.messages import Broadcast, Failure, LocalSettings, Update
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.methods.scaffold import Scaffold
from fedhet.task import Task

PIECES = [(FedAvg, list), (Scaffold, lambda: [FedNormPlugin()])]


def with_dropout() -> Task:
    """The toy federation with a model that draws from torch's global generator while it trains."""
    task = toy_task(6)

    def model() -> nn.Module:
        made = toy_task().model()
        made.body.append(nn.Dropout(0.3))  # type: ignore[union-attr, operator]
        return made

    task.model = model
    return task


@pytest.mark.parametrize(("cls", "plugins"), PIECES, ids=["fedavg", "scaffold+fednorm"])
def test_order_of_service(
    federation: Callable[..., Any], cls: type, plugins: Callable[[], Any]
) -> None:
    hashes = set()
    for seed in range(4):
        run = federation(with_dropout(), cls, plugins=plugins, rounds=3, fraction=0.7)
        draw = random.Random(seed)
        for number in range(1, 4):
            torch.manual_seed(seed)  # what a caller does to the global generator is nothing to us
            plan = run.strategy.plan(number)
            order = draw.sample(range(len(plan)), len(plan))
            served = {i: run.client().handle(plan[i]) for i in order}
            run.strategy.settle(served[i] for i in range(len(plan)))
        hashes.add(run.sha256)
    assert len(hashes) == 1


class Node(ClientProxy):
    """A node in this process, as Flower's server sees it."""

    # Flower asks its nodes in threads; in one process they share torch's generator
    lock = threading.Lock()

    def __init__(
        self, cid: str, make: Callable[[dict[str, Any]], Client], partition: int, total: int
    ) -> None:
        super().__init__(cid)
        self.make = lambda: make({"partition-id": partition, "num-partitions": total})

    def get_properties(
        self, ins: GetPropertiesIns, timeout: float | None, group_id: int | None
    ) -> GetPropertiesRes:
        return self.make().get_properties(ins)

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        with self.lock:
            return self.make().fit(ins)

    def evaluate(
        self, ins: EvaluateIns, timeout: float | None, group_id: int | None
    ) -> EvaluateRes:
        with self.lock:
            return self.make().evaluate(ins)

    def get_parameters(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
        raise AssertionError("the strategy gives the initial parameters")

    def reconnect(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
        raise AssertionError


def nodes(run: Any, cls: type, plugins: Callable[[], Any], total: int) -> SimpleClientManager:
    manager = SimpleClientManager()
    numbers = random.Random(5).sample(range(10**6), total)  # Flower's ids are random
    for partition, number in enumerate(numbers):

        def make(properties: dict[str, Any]) -> Client:
            return cls.client_cls(run.site, plugins(), run.store, properties).to_client()  # type: ignore[attr-defined]

        manager.register(Node(str(number), make, partition, total))
    return manager


@pytest.mark.parametrize("total", [1, 2, 6])
@pytest.mark.parametrize(("cls", "plugins"), PIECES, ids=["fedavg", "scaffold+fednorm"])
def test_under_flowers_own_server(
    federation: Callable[..., Any], cls: type, plugins: Callable[[], Any], total: int
) -> None:
    """Flower's unmodified loop over the six methods of its Strategy, on fewer nodes than clients
    and on as many."""
    how = {"plugins": plugins, "rounds": 3, "fraction": 0.7}
    expected = federation(with_dropout(), cls, **how).run()
    run = federation(with_dropout(), cls, **how)
    history, _ = Server(client_manager=nodes(run, cls, plugins, total), strategy=run.strategy).fit(
        3, None
    )
    assert run.sha256 == expected.sha256
    assert [number for number, _ in history.losses_centralized] == [0, 1, 2, 3]
    assert history.losses_centralized[-1][1] == global_scores(expected.strategy)["loss"]
    assert (
        history.metrics_centralized["accuracy"][-1][1]
        == global_scores(expected.strategy)["accuracy"]
    )


def results(run: Any, plan: list[Broadcast]) -> list[tuple[Any, FitRes]]:
    packer = wire.Packer()
    return [(None, run.client().to_client().fit(wire.fit_ins(msg, packer))) for msg in plan]


def test_replies_are_put_in_order_and_missing_ones_are_named(
    federation: Callable[..., Any],
) -> None:
    run = federation(toy_task(6), FedAvg)
    plan = run.strategy.plan(1)
    found = results(run, plan)
    random.Random(3).shuffle(found)
    sent = {msg.pid: msg for msg in plan}
    replies = list(run.strategy.nodes.in_order(sent, found, []))
    assert [reply.pid for reply in replies] == list(sent) and all(
        isinstance(reply, Update) for reply in replies
    )

    lost = [
        pair
        for pair in found
        if not isinstance(pair[1].metrics["fedhet"], str)
        or '"pid": 3' not in pair[1].metrics["fedhet"]
    ]
    replies = list(run.strategy.nodes.in_order(sent, lost, [TimeoutError("no answer")]))
    failures = [reply for reply in replies if isinstance(reply, Failure)]
    assert [(f.pid, f.phase, f.step) for f in failures] == [
        (3, "train", 1)
    ] and "no answer" in failures[0].cause


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"x",
        "",
        "{",
        "null",
        "[]",
        '"text"',
        "5",
        '{"pid": 2}',
        '{"failure": 3}',
        '{"failure": {"pid": 2}}',
    ],
)
def test_a_reply_without_a_readable_header_is_a_failure(
    federation: Callable[..., Any], header: Any
) -> None:
    run = federation(toy_task(3), FedAvg)
    plan = run.strategy.plan(1)
    found = results(run, plan)
    found[0][1].metrics["fedhet"] = header
    replies = list(run.strategy.nodes.in_order({msg.pid: msg for msg in plan}, found, []))
    assert [type(reply) for reply in replies] == [Failure, Update, Update]
    assert (replies[0].pid, replies[0].phase, replies[0].step) == (plan[0].pid, "train", 1)


def test_a_reply_signed_for_a_client_of_another_node_is_left_out() -> None:
    """Else one node could speak for another's clients."""
    here, there = SimpleNamespace(cid="here"), SimpleNamespace(cid="there")
    nodes = Nodes()
    nodes._by_partition, nodes._total = {0: here, 1: there}, 2  # type: ignore[dict-item]
    sent = {
        pid: Broadcast(phase="train", step=1, round=1, local=LocalSettings(lr=0.1), pid=pid)
        for pid in (0, 1)
    }

    def reply(pid: int, n: int) -> FitRes:
        arrays, examples, metrics = wire.reply_arrays(Update(pid, n))
        return FitRes(Status(Code.OK, ""), ndarrays_to_parameters(arrays), examples, metrics)

    forged = list(
        nodes.in_order(sent, [(here, reply(1, 99)), (here, reply(0, 5)), (there, reply(1, 7))], [])
    )
    assert [update.num_examples for update in forged if isinstance(update, Update)] == [5, 7]
