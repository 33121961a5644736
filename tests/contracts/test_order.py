"""Neither the order in which clients are served nor the order of their replies changes a bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contracts.hostile import served
from contracts.tasks import with_dropout
from flwr.common import FitRes

from fedhet.core.messages import Failure, Upload
from fedhet.data.toy import toy_task
from fedhet.flower import wire
from fedhet.flower.adapter import StrategyAdapter
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
            run.finish_step(served[i] for i in range(len(plan)))
        hashes.add(run.sha256)
    assert len(hashes) == 1


class Connected:
    """So many nodes, each with the client of its number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def ids(self) -> set[str]:
        return set(map(str, range(self.count)))

    def ask(self, ids: Collection[str], seconds: float) -> Iterator[tuple[str, Any]]:
        for cid in ids:
            yield cid, {"partition-id": int(cid), "num-partitions": self.count}


def first_round(run: Any, count: int) -> tuple[StrategyAdapter, list[tuple[Any, FitRes]]]:
    """What Flower's Server calls, and the replies of the clients as it delivers them."""
    adapter = StrategyAdapter(run.strategy)
    adapter.begin(1, Connected(count))
    packer = wire.MessagePacker()
    hosted = adapter.hosted(Connected(count))
    return adapter, [
        (SimpleNamespace(cid=node), served(run).fit(wire.fit_ins(msg, packer)))
        for node, msg in hosted
    ]


def test_replies_are_put_in_order_and_missing_ones_are_named(
    federation: Callable[..., Any],
) -> None:
    run = federation(toy_task(6), FedAvg)
    adapter, results = first_round(run, 6)
    random.Random(3).shuffle(results)
    replies = list(adapter._in_order(results, []))
    assert [reply.pid for reply in replies] == list(adapter.awaited)
    assert all(isinstance(reply, Upload) for reply in replies)

    without_3 = [(node, res) for node, res in results if node.cid != "3"]
    replies = list(adapter._in_order(without_3, [TimeoutError("no answer")]))
    failures = [reply for reply in replies if isinstance(reply, Failure)]
    assert [(f.pid, f.phase, f.step) for f in failures] == [(3, "train", 1)]
    assert failures[0].cause == "no reply from clients [3]: no answer"


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
    adapter, results = first_round(run, 3)
    results[0][1].metrics["fedhet"] = header
    first = next(iter(adapter.awaited))
    replies = list(adapter._in_order(results, []))
    assert [type(reply) for reply in replies] == [Failure, Upload, Upload]
    assert (replies[0].pid, replies[0].phase, replies[0].step) == (first, "train", 1)


def test_a_node_cannot_reply_in_the_name_of_another_node_s_client(
    federation: Callable[..., Any],
) -> None:
    run = federation(toy_task(3), FedAvg)
    adapter, results = first_round(run, 3)
    forged = [(results[0][0], results[1][1]), *results[1:]]
    replies = list(adapter._in_order(forged, []))
    assert [type(reply) for reply in replies] == [Failure, Upload, Upload]
    assert "another message" in str(replies[0])
