"""Forged replies to evaluations and deliveries, and forged descriptions of sites' data that join.

Nothing raises but the refusal, and whatever passes is sound, as is what is recorded of it.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet
import pytest
import torch
from contracts.fuzzing import CASES, damage, flipped, mutate
from contracts.hostile import LIMIT, Federation, forge
from engines.own_sites import Deployment, write_sites
from flwr.common import Code, EvaluateRes, Parameters, Status, ndarrays_to_parameters
from targets.tasks import task_of

from fedhet.core.messages import Broadcast, Failure, Reply, Upload
from fedhet.core.server.evaluation import (
    client_details,
    client_means,
    evaluation_messages,
    mostly_diverged,
    received,
)
from fedhet.core.server.loop import Loop
from fedhet.data.local.description import MOST_SAMPLES, Agreement
from fedhet.data.storage import as_json
from fedhet.data.toy import toy_task
from fedhet.flower import wire
from fedhet.methods.fedavg import FedAvg
from fedhet.runs.delivery import Delivery
from fedhet.runs.local_data import LocalData
from fedhet.runs.record.run_folder import Recorder


def arrived(msg: Broadcast, reply: Reply, draw: random.Random | None) -> Reply:
    """The reply as it is read, after it was damaged or its header was forged."""
    arrays, examples, carried = wire.reply_arrays(msg, reply)
    for number, tensor in enumerate(ndarrays_to_parameters(arrays).tensors):
        carried[f"{wire.ARRAY}{number:06}"] = tensor
    res: Any = SimpleNamespace(metrics=carried, parameters=Parameters([], ""))
    if draw is not None and draw.random() < 0.1:
        damage(res, draw)
    elif draw is not None:
        forge(res, lambda header: mutate(header, draw))
    return wire.read_result(
        msg, EvaluateRes(Status(Code.OK, ""), 0.0, examples, res.metrics), LIMIT
    )


def lying(reply: Upload, draw: random.Random) -> Upload:
    """The reply with another number in one of its tallies, if it has some."""
    if not reply.extras:
        return reply
    extras = {name: dict(value) for name, value in reply.extras.items()}  # type: ignore[call-overload]
    tally = extras[draw.choice(list(extras))]
    name = draw.choice(list(tally))
    tensor = tally[name] = tally[name].clone()
    value = draw.choice([-1, 0, 1, 10**6, 10**15, 2**53 + 1, 2**62, math.nan, math.inf, 1e308])
    if tensor.is_floating_point() or isinstance(value, int):
        tensor.view(-1)[draw.randrange(tensor.numel())] = value
    return replace(reply, extras=extras)


@pytest.mark.parametrize("cases", CASES)
@pytest.mark.parametrize("target", ["class", "detailed", "number", "labels"])
def test_fuzzed_evaluations(
    federation: Federation, tmp_path: Path, target: str, cases: int
) -> None:
    draw = random.Random(0)
    task = toy_task(3) if target in ("class", "detailed") else task_of(target)
    task.detailed = target == "detailed"
    run = federation(task, FedAvg, on_failure="skip")
    run.workspace.evaluation = replace(run.workspace.evaluation, train=True)
    run.step()
    plan = evaluation_messages(run.strategy)[:2]
    honest = [run.client().handle(msg) for msg in plan]
    record: Any = SimpleNamespace(folder=tmp_path)
    passed = 0
    for _ in range(cases):
        lie = draw.random() < 0.3
        first = lying(honest[0], draw) if lie else honest[0]
        replies = [arrived(plan[0], first, None if lie else draw)]
        replies.append(arrived(plan[1], honest[1], None))
        updates = received(replies, run.strategy)
        mostly_diverged(updates, run.strategy)
        metrics = {update.pid: update.metrics for update in updates}
        Recorder.write_clients(record, 1, updates)
        table = pyarrow.parquet.read_table(tmp_path / "clients" / "round-000001.parquet")
        own = [name for name in table["metric"].to_pylist() if "[" not in name]  # no cells
        assert len(own) == sum(map(len, metrics.values()))
        json.loads(as_json(client_details(updates, run.strategy.views, run.workspace.task.scoring)))
        means = client_means(updates, run.strategy.views, run.workspace.task.scoring)
        json.loads(as_json(means))
        for name, value in means.items():
            assert not math.isnan(value), (name, replies[0])
        for name, value in updates[0].metrics.items() if len(updates) == 2 else ():
            if name.endswith(".n"):
                assert value == honest[0].metrics[name]
            elif not name.endswith((".loss", ".rmse", ".mae", ".r2")):
                assert 0 <= value <= 1, name
        passed += len(updates) == 2
    assert 0 < passed < cases


@pytest.mark.parametrize("cases", CASES)
def test_fuzzed_replies_to_a_delivery(federation: Federation, cases: int) -> None:
    """No more of a reply is recorded than whether the client has kept the model, or why not."""
    draw = random.Random(0)
    run = federation(toy_task(4), FedAvg, on_failure="skip")
    run.step()
    loop = Loop(run.strategy)

    def exchange(plan: list[Broadcast]) -> Iterable[Reply]:
        yield arrived(plan[0], Failure(0, "evaluate", 1, "the disk is full"), draw)
        for msg in plan[1:]:
            yield arrived(msg, Upload(msg.pid, 5), draw)

    loop.transport = SimpleNamespace(store=None, exchange=lambda plan, clock: exchange(plan))
    for _ in range(cases // 3):
        loop.failures.clear()
        Delivery().ended(loop, "ok", None)
        delivery = json.loads(as_json(loop.notes))["delivery"]
        assert set(delivery["clients"]) <= {1, 2, 3}
        assert set(delivery["failed"]) == {str(f["pid"]) for f in loop.failures}
        assert len(delivery["clients"]) + len(delivery["failed"]) == 4
        assert all(isinstance(cause, str) for cause in delivery["failed"].values())


@pytest.mark.parametrize("cases", CASES)
def test_fuzzed_descriptions_of_sites(tmp_path: Path, cases: int) -> None:
    """What passes can be joined with the other sites', and the run be built from it."""
    draw = random.Random(0)
    deployment = Deployment(write_sites(tmp_path), sites="")
    nodes = [
        deployment.join(workspace, number, share_counts=True)
        for number, workspace in enumerate("abc", 1)
    ]
    properties = [node.who() for node in nodes]
    read = deployment.nodes._description
    others = [read(one) for one in properties[1:]]
    passed = 0
    for _ in range(cases):
        text = properties[0]["description"]
        if draw.random() < 0.1:
            text = flipped(text.encode(), draw).decode("latin1")
        else:
            content = json.loads(text)
            mutate(content, draw)
            text = json.dumps(content)
        try:
            description = read({"description": text})
        except ValueError as error:
            assert len(str(error)) < 1000
            continue
        passed += 1
        agreed = Agreement.of(deployment.nodes._declared, [description, *others])
        deployment.nodes._warn(agreed)
        for name, values in agreed.statistics.items():
            single = torch.tensor(values)
            assert single.isfinite().all() and (not name.endswith("std") or single.min() > 0)
        record = LocalData.agreed_on(deployment.cfg, agreed).partition_record()
        json.loads(as_json(record))
        assert all(type(n) is int and 0 <= n <= MOST_SAMPLES for n in description.sizes)
        assert all(n is None or 0 <= n <= sum(description.sizes) for n in description.counts or [])
    assert 0 < passed < cases
