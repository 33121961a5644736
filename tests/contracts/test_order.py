"""Neither the order in which clients are served nor the order of their replies changes a bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contracts.hostile import served
from contracts.tasks import with_dropout
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters

from fedhet.core.groups import ReplyLimits
from fedhet.core.messages import Broadcast, Failure, LocalSettings, Upload
from fedhet.data.toy import toy_task
from fedhet.flower import wire
from fedhet.flower.nodes import Nodes
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.methods.scaffold import Scaffold


@pytest.mark.parametrize(
    ("cls", "plugins"),
    [(FedAvg, list), (Scaffold, lambda: [FedNormPlugin()])],
    ids=["fedavg", "scaffold+fednorm"],
)
def test_the_order_in_which_clients_are_served(
    federation: Callable[..., Any], cls: type, plugins: Callable[[], Any]
) -> None:
    hashes = set()
    for seed in range(4):
        run = federation(with_dropout(), cls, plugins=plugins, rounds=3, fraction=0.7)
        draw = random.Random(seed)
        for _ in range(3):
            torch.manual_seed(seed)  # the caller's global generator must have no influence
            plan = run.plan()
            order = draw.sample(range(len(plan)), len(plan))
            served = {i: run.client().handle(plan[i]) for i in order}
            run.settle(served[i] for i in range(len(plan)))
        hashes.add(run.sha256)
    assert len(hashes) == 1


def flower_results(run: Any, plan: list[Broadcast]) -> list[tuple[Any, FitRes]]:
    """The clients' replies as Flower delivers them, without their nodes."""
    packer = wire.MessagePacker()
    return [(SimpleNamespace(cid="0"), served(run).fit(wire.fit_ins(msg, packer))) for msg in plan]


def signed_by(res: FitRes) -> int:
    return wire.read_header(res.metrics)["pid"]


def test_replies_are_put_in_order_and_missing_ones_are_named(
    federation: Callable[..., Any],
) -> None:
    run = federation(toy_task(6), FedAvg)
    plan = run.strategy.plan(1).messages
    sent = {msg.pid: msg for msg in plan}
    results = flower_results(run, plan)
    random.Random(3).shuffle(results)
    nodes = Nodes(run.strategy.setting.replies)
    replies = list(nodes.in_order(sent, results, [], 2**20))
    assert [reply.pid for reply in replies] == list(sent)
    assert all(isinstance(reply, Upload) for reply in replies)

    without_3 = [(node, res) for node, res in results if signed_by(res) != 3]
    replies = list(nodes.in_order(sent, without_3, [TimeoutError("no answer")], 2**20))
    failures = [reply for reply in replies if isinstance(reply, Failure)]
    assert [(f.pid, f.phase, f.step) for f in failures] == [(3, "train", 1)]
    assert "no answer" in failures[0].cause


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
    plan = run.strategy.plan(1).messages
    results = flower_results(run, plan)
    results[0][1].metrics["fedhet"] = header
    nodes = Nodes(run.strategy.setting.replies)
    replies = list(nodes.in_order({msg.pid: msg for msg in plan}, results, [], 2**20))
    assert [type(reply) for reply in replies] == [Failure, Upload, Upload]
    assert (replies[0].pid, replies[0].phase, replies[0].step) == (plan[0].pid, "train", 1)


def test_a_reply_signed_for_a_client_of_another_node_is_left_out() -> None:
    """Otherwise one node could reply in the name of another node's clients."""
    here = SimpleNamespace(cid="here")
    there = SimpleNamespace(cid="there")
    nodes = Nodes(ReplyLimits())
    nodes._by_partition = {0: here.cid, 1: there.cid}
    nodes._total = 2
    sent = {
        pid: Broadcast(phase="train", step=1, round=1, local=LocalSettings(lr=0.1), pid=pid)
        for pid in (0, 1)
    }

    def reply(pid: int, n: int) -> FitRes:
        arrays, examples, metrics = wire.reply_arrays(sent[pid], Upload(pid, n))
        return FitRes(Status(Code.OK, ""), ndarrays_to_parameters(arrays), examples, metrics)

    results = [(here, reply(1, 99)), (here, reply(0, 5)), (there, reply(1, 7))]
    updates = [
        reply for reply in nodes.in_order(sent, results, [], 2**20) if isinstance(reply, Upload)
    ]
    assert [update.num_examples for update in updates] == [5, 7]
