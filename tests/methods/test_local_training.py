"""Local training, the reference without a federation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from methods.readouts import client_state

import fedhet
from fedhet.core.client.client import UNSHARED
from fedhet.core.task import ClientData
from fedhet.data.toy import toy_task
from fedhet.flower import wire
from fedhet.methods.ditto import Ditto
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.local import Local

Federation = Callable[..., Any]
SETTINGS = {"rounds": 3, "epochs": 2, "local": {"momentum": 0.9}}


@pytest.mark.parametrize("buffers", ["average", "local", "frozen"])
def test_it_is_ditto_without_a_pull(federation: Federation, buffers: str) -> None:
    """Bit for bit, statistics of batch norm included, whoever takes part."""
    how = {**SETTINGS, "fraction": 0.5, "buffers": buffers}
    local = federation(toy_task(norm=True), Local, **how).run()
    ditto = federation(
        toy_task(norm=True), Ditto, options={"lam": 0.0, "plocal_epochs": 2}, **how
    ).run()
    assert local.strategy.run.versions == ditto.strategy.run.versions
    for pid in local.strategy.run.versions:
        own, expected = client_state(local, pid, UNSHARED), client_state(ditto, pid, "ditto.v")
        assert own.keys() == expected.keys()
        assert all(torch.equal(t, expected[name]) for name, t in own.items())


def test_a_client_alone_has_fedavgs_model(federation: Federation) -> None:
    """Bit for bit; and the other clients' data change nothing."""
    alone, fedavg = (federation(toy_task(1), cls, **SETTINGS).run() for cls in (Local, FedAvg))
    own = client_state(alone, 0, UNSHARED)
    assert all(torch.equal(t, own[name]) for name, t in fedavg.model.items())
    task = toy_task()
    others = [ClientData((client.train.x + 1, client.train.y)) for client in task.clients[1:]]
    changed = replace(task, clients=[task.clients[0], *others])
    beside = client_state(federation(changed, Local, **SETTINGS).run(), 0, UNSHARED)
    assert all(torch.equal(t, beside[name]) for name, t in own.items())


def test_nothing_travels(federation: Federation) -> None:
    run = federation(toy_task(norm=True), Local, rounds=2)
    first = run.sha256
    run.step()
    for msg in run.strategy.plan(2).messages:
        reply = run.client().handle(msg)
        assert not msg.weights and not msg.extras and not reply.weights and not reply.extras
        assert not wire.reply_arrays(msg, reply)[0]
    assert run.sha256 == first


def test_a_client_is_scored_by_its_own_model(launch: Callable[..., fedhet.Run]) -> None:
    """The mean over the clients of the accuracy that each model has on its client's test part."""
    task = toy_task()
    run = launch("method=local", "rounds=1", "client.lr=.5", task=task)
    hits = []
    for pid, client in enumerate(task.clients):
        model = fedhet.load(run, "personal", client=pid, model=task.model()).eval()
        hits.append(float((model(client.test.x).argmax(1) == client.test.y).double().mean()))
    assert len(set(hits)) > 1
    assert run.summary["personal"]["last"] == pytest.approx(sum(hits) / 4)
    assert run.summary["models"] == ["personal"] and run.summary["accuracy"]["last"] is None
    assert run.summary["bytes"] == {"up": {}, "down": {}}
