"""How sites with data of their own join a run, and with whom messages are exchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from composing import composed
from own_sites import Deployment, simulated, write_sites

from fedhet.core.messages import Failure
from fedhet.core.trees import sha256
from fedhet.runs.job import Job
from fedhet.runs.local_data import LocalData


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_sites(tmp_path)


@pytest.mark.parametrize("order", [pytest.param("abc", marks=pytest.mark.slow), "cab"])
def test_messages_to_the_sites_give_the_bytes_of_a_simulation(folder: Path, order: str) -> None:
    """Whatever the order in which the nodes have joined."""
    deployment = Deployment(folder, sites=order)
    agreed = deployment.agree()
    settings = composed(*deployment.overrides)
    job = Job(settings, engine="flwr", local=LocalData.agreed_on(settings.cfg, agreed))
    for number in (1, 2):
        replies = []
        step = job.strategy.plan(number)
        for msg in step.messages:
            node = deployment.host(msg.pid)
            replies.append(node.serve(msg, deployment.nodes.agreed))
        job.strategy.finish_step(step, replies)
    expected = simulated(folder, "eval.clients=false")
    assert sha256(job.strategy.weights) == expected.summary["weights_sha256"]
    assert job.partition["hash"] == expected.summary["partition"]["hash"]
    assert job.partition["train_sizes"] == [80, 120, 40]


def test_a_message_for_another_site_is_refused(folder: Path) -> None:
    deployment = Deployment(folder)
    agreed = deployment.agree()
    settings = composed(*deployment.overrides)
    job = Job(settings, engine="flwr", local=LocalData.agreed_on(settings.cfg, agreed))
    msg = job.strategy.plan(1).messages[0]
    wrong = next(node for node in deployment.members.nodes.values())
    if int(wrong.cid) == msg.pid + 1:
        wrong = deployment.members.nodes[str((msg.pid + 1) % 3 + 1)]
    reply = wrong.serve(msg, deployment.nodes.agreed)
    assert isinstance(reply, Failure) and "the message is for client" in reply.cause


def test_counts_are_told_only_by_sites_that_allow_it(folder: Path) -> None:
    deployment = Deployment(folder, "privacy.min_count=1", sites="a")
    deployment.join("b", 2, share_counts=True)
    deployment.join("c", 3, share_counts=True, min_count=1)
    descriptions = deployment.agree().descriptions
    assert descriptions[0].counts is None
    assert all(count is None or count >= 5 for count in descriptions[1].counts)
    assert sum(descriptions[2].counts) == 50
    record = LocalData.agreed_on(deployment.cfg, deployment.agree()).partition_record()
    assert record["reported_counts"]["a"] is None and "counts" not in record


def test_a_site_refuses_a_normalisation_that_is_none(folder: Path) -> None:
    deployment = Deployment(folder)
    settings = composed(*deployment.overrides)
    data = LocalData.agreed_on(settings.cfg, deployment.agree())
    msg = Job(settings, engine="flwr", local=data).strategy.plan(1).messages[0]
    node: Any = deployment.host(msg.pid)
    mean = {"mean": [0.0] * 64}
    for agreed in (None, {}, mean, {**mean, "std": [0.0] * 64}, "auto"):
        reply = node.serve(msg, agreed)
        assert isinstance(reply, Failure) and "no valid statistics" in reply.cause
