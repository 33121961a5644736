"""client.steps: a number of local optimiser steps in place of epochs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from asking import packed_message
from composing import composed
from contracts.short import SHORT, slow, slow_unless
from fused.fusing import groups

from fedhet.core.errors import ConfigError
from fedhet.core.groups import Evaluation
from fedhet.core.kernel import Plugin, Step
from fedhet.core.messages import Broadcast, LocalSettings
from fedhet.data.toy import toy_task
from fedhet.flower import wire
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fednova import FedNova
from fedhet.methods.scaffold import Scaffold
from fedhet.runs.config import catalogue

Launch = Callable[..., Any]
Federation = Callable[..., Any]
LINES = ["rounds=2", "client.lr=0.1", "client.batch_size=5", "fraction=0.75"]
EPOCHS = 2
STEPS = EPOCHS * 3  # 12 samples in batches of 5
# FedGMM's clients train on samples that they have drawn, in numbers that differ, FedSGD's take no
# local step, and a step of pooled training has the samples of all. Those that are not slow count
# steps, train in a loop of their own or train twice.
METHODS = [
    name for name in catalogue.choices("method") if name not in ("fedgmm", "fedsgd", "pooled")
]
FAST = {"ditto", "fedavg", "fedgen", "fednova", "fedpcl", "scaffold"}


@pytest.mark.parametrize("method", slow_unless(FAST, METHODS))
def test_as_many_steps_as_batches_give_the_bytes_of_epochs(launch: Launch, method: str) -> None:
    lines = [f"method={method}", *LINES, *SHORT.get(method, []), "eval.clients=false"]
    epochs, steps = (
        launch(*lines, f"client.epochs={epochs}", *more, task=toy_task(3, equal=True, norm=True))
        for epochs, more in ((EPOCHS, []), (1, [f"client.steps={STEPS}"]))
    )
    assert steps.summary["weights_sha256"] == epochs.summary["weights_sha256"]


@pytest.mark.parametrize("client", [[], ["client=adam", "client.lr=.01"], ["client.momentum=.9"]])
def test_with_every_optimiser(launch: Launch, client: list[str]) -> None:
    lines = ["method=fedavg", *LINES, *client, "eval.clients=false"]
    task = toy_task(3, equal=True)
    epochs = launch(*lines, f"client.epochs={EPOCHS}", task=task)
    steps = launch(*lines, f"client.steps={STEPS}", task=task)
    assert steps.summary["weights_sha256"] == epochs.summary["weights_sha256"]
    fewer = launch(*lines, f"client.steps={STEPS - 1}", task=task)
    assert fewer.summary["weights_sha256"] != epochs.summary["weights_sha256"]


@pytest.mark.parametrize("steps", [1, 3, 4, 11])
@pytest.mark.parametrize("norm", [False, True])
def test_by_hand(federation: Federation, steps: int, norm: bool) -> None:
    """torch's SGD over the batches of the epochs, which are ended where the steps are done.

    Client 1 has 16 samples: batches of 5, and with batch norm no trailing batch of one.
    """
    run = federation(toy_task(norm=norm), FedAvg, batch_size=5, local={"steps": steps}, epochs=1)
    (msg, *_) = [msg for msg in run.strategy.plan(1).messages if msg.pid == 1]
    client = run.client()
    update = client.handle(msg)
    assert client.ctx.steps == steps
    data = run.workspace.task.clients[1].train
    assert len(data) == 16
    model = run.workspace.task.model()
    model.load_state_dict(msg.weights)
    model.train()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    client.receive(msg)
    kept = 15 if norm else 16
    epochs = (order[:kept].split(5) for order in client.ctx._orders(16))
    for batch in itertools.islice(itertools.chain.from_iterable(epochs), steps):
        sgd.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(data.x[batch]), data.y[batch])
        loss.backward()
        sgd.step()
    for name, t in model.state_dict().items():
        torch.testing.assert_close(update.weights[name], t, rtol=1e-5, atol=1e-7)


def test_scaffold_is_told_the_steps_taken(federation: Federation) -> None:
    """Every client takes as many, whatever its size; its control is the mean gradient of those."""
    run = federation(toy_task(), Scaffold, local={"steps": 7}, rounds=2)
    plan = run.strategy.plan(1).messages
    for msg in plan:
        update = run.client().handle(msg)
        assert update.extras["scaffold.steps"] == 7
        for name, control in update.extras["scaffold.c_plus"].items():
            gradient = (msg.weights[name] - update.weights[name]) / (7 * 0.1)
            torch.testing.assert_close(control, gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fednova_with_equal_steps_is_fedavg(federation: Federation, momentum: float) -> None:
    """Bit for bit, though the clients' sizes differ; with epochs it is not."""
    for local, equal in (({"steps": 5}, True), ({}, False)):
        settings = {"local": {**local, "momentum": momentum}, "rounds": 2, "epochs": 2}
        nova, fedavg = (federation(toy_task(), cls, **settings).run() for cls in (FedNova, FedAvg))
        assert (nova.sha256 == fedavg.sha256) == equal
        if equal and not momentum:
            assert nova.current.recorded["fednova"]["tau_eff"] == 5


@dataclass(frozen=True, kw_only=True)
class Growing(Plugin):
    """One step in the first round, two in the second, ..."""

    name = "growing"

    def local(self, step: Step, local: LocalSettings) -> LocalSettings:
        return replace(local, steps=step.number)


def test_a_plugin_can_schedule_them(federation: Federation) -> None:
    run = federation(toy_task(), Scaffold, plugins=lambda: [Growing()], rounds=3)
    for number in (1, 2, 3):
        counted: list[Any] = []

        def count(plan: list[Any], replies: list[Any], counted: list[Any] = counted) -> list[Any]:
            counted += [reply.extras["scaffold.steps"] for reply in replies]
            return replies

        run.step(count)
        assert counted == [number] * 4


@pytest.mark.parametrize("steps", [None, 7])
def test_they_travel(steps: int | None) -> None:
    local = LocalSettings(lr=0.1, steps=steps)
    msg = Broadcast(phase="train", step=1, round=1, local=local, pid=0)
    assert wire.read_broadcast(*packed_message(msg)).local == local


def test_engines_agree(launch: Launch) -> None:
    lines = ["method=fednova", *LINES, "client.steps=7"]
    runs = [
        launch(*lines, f"engine.workers={workers}", task=toy_task(norm=True)) for workers in (1, 2)
    ]
    assert runs[0].summary["weights_sha256"] == runs[1].summary["weights_sha256"]


def largest_difference(a: Any, b: Any) -> float:
    return max(float((t - b.weights[name]).abs().max()) for name, t in a.weights.items())


@pytest.mark.parametrize("steps", [7, *slow(2)])
def test_clients_that_train_as_one_take_them(launch: Launch, steps: int) -> None:
    """Clients of unequal sizes, in unequal batches, each its own number of epochs."""
    lines = ["method=fednorm", *LINES, f"client.steps={steps}", "fraction=1"]
    single = launch(*lines, task=toy_task())
    with groups() as counted:
        fused = launch(*lines, "engine.fused=2", task=toy_task())
    assert counted["steps", 2] == 4
    assert largest_difference(single, fused) < 1e-5
    fewer = launch(*lines, f"client.steps={steps - 1}", "engine.fused=2", task=toy_task())
    assert largest_difference(fewer, fused) > 1e-3


@pytest.mark.parametrize("steps", [7, *slow(2)])
def test_compiled_steps_are_counted(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """What engine.compile compiles, here uncompiled."""
    monkeypatch.setattr(torch, "compile", lambda f, **how: f)
    lines = ["method=fednova", *LINES, f"client.steps={steps}"]
    eager, compiled = (
        launch(*lines, f"engine.compile={on}", task=toy_task(norm=True)) for on in ("false", "true")
    )
    assert largest_difference(eager, compiled) < 1e-5


def test_what_counts_epochs_of_its_own_is_unaffected(federation: Federation) -> None:
    """Ditto's v_k, FedBABU's fine-tuning and eval.finetune_epochs name their own epochs."""
    from fedhet.core.server.evaluation import evaluation_messages
    from fedhet.methods.ditto import Ditto
    from fedhet.methods.fedbabu import FedBABU

    alone, limited = (
        federation(toy_task(), Ditto, options={"plocal_epochs": 2}, local=local)
        for local in ({}, {"steps": 1})
    )
    for run in (alone, limited):
        run.step()
    assert alone.sha256 != limited.sha256
    for pid in range(4):
        own, other = (run.store.load(pid, 1) for run in (alone, limited))
        assert all(torch.equal(t, other[name]) for name, t in own.items() if "ditto.v" in name)

    for cls, how in (
        (FedBABU, {}),
        (FedAvg, {"evaluation": Evaluation(finetune_epochs=3)}),
    ):
        scores = []
        for local in ({}, {"steps": 1}):
            run = federation(toy_task(), cls, local=local, rounds=2, **how)
            scores.append(
                [run.client().handle(m).metrics for m in evaluation_messages(run.strategy)]
            )
        assert scores[0] == scores[1]


def test_fedsgd_takes_no_local_step() -> None:
    from fedhet.runs.job import Job

    with pytest.raises(ConfigError, match=r"client\.steps=3: method=fedsgd "):
        _ = Job(composed("method=fedsgd", "client.steps=3"), toy_task()).strategy


@pytest.mark.parametrize("value", ["0", "1.5", "many"])
def test_bad_values_are_named(value: str) -> None:
    with pytest.raises(ConfigError, match=rf"^client\.steps={value} .* null"):
        composed(f"client.steps={value}")
