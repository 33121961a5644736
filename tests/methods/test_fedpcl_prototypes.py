"""FedPCL's prototypes: how clients form them, and which classes have one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from methods.readouts import client_state
from torch import Tensor, nn

from fedhet.core.client.client import UNSHARED
from fedhet.core.messages import Failure
from fedhet.core.server.evaluation import evaluation_messages
from fedhet.core.task import ClientData, Samples, Task
from fedhet.data.toy import ToyModel, toy_task
from fedhet.methods.fedpcl import FedPCL


def one_label_each(labels: tuple[int, ...], tests: int | None = None) -> Task:
    """Client k has the label labels[k] only; each tests on the label `tests`."""
    plain = toy_task(len(labels), equal=True)
    clients = []
    for label, c in zip(labels, plain.clients, strict=True):
        assert c.test is not None
        test = None if tests is None else Samples(c.test.x, torch.full_like(c.test.y, tests))
        train = Samples(c.train.x, torch.full_like(c.train.y, label))
        clients.append(ClientData(train, None, test))
    return replace(plain, clients=clients)


def test_prototypes_are_formed_in_eval_mode(federation: Callable[..., Any]) -> None:
    """With the running statistics that the client's predictions use."""
    run = federation(toy_task(norm=True), FedPCL, rounds=1).run()
    for pid, client in enumerate(run.workspace.task.clients):
        kept = client_state(run, pid, UNSHARED)
        assert list(kept) == run.workspace.kept
        model = run.workspace.task.model().eval()
        model.load_state_dict({**run.workspace.initial, **kept})
        z = nn.functional.normalize(model.features(client.train.x)).detach()
        expected = torch.stack([z[client.train.y == c].mean(0) for c in range(2)])
        own = client_state(run, pid, "fedpcl.own")["mean"]
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)


def test_renormalised_prototypes_have_length_one(federation: Callable[..., Any]) -> None:
    for renormalise in (False, True):
        run = federation(toy_task(), FedPCL, options={"renormalise": renormalise}, rounds=1).run()
        mean = run.strategy.weights["prototypes"]["mean"]
        sets = run.strategy.run.states["method"]["clients"].flatten(0, 1)
        for rows in (mean, sets):
            ones = torch.ones(len(rows))
            assert torch.allclose(rows.norm(dim=1), ones, atol=1e-6) is renormalise


def test_a_class_that_no_participant_has_keeps_its_prototype(
    federation: Callable[..., Any],
) -> None:
    run = federation(one_label_each((0, 1)), FedPCL, rounds=3, fraction=0.5)
    run.step()
    for _ in range(3):
        before = run.strategy.weights["prototypes"]["mean"].clone()
        (msg,) = run.step()
        own = msg.pid
        other = 1 - own
        slot = run.strategy.weights["prototypes"]
        assert slot["has"].all()
        assert torch.equal(slot["mean"][other], before[other])
        assert not torch.equal(slot["mean"][own], before[own])
        # the filled row of its own set
        assert torch.equal(run.strategy.run.states["method"]["clients"][0, other], before[other])


@pytest.mark.parametrize("unseen", ["exclude", "global"])
def test_classes_that_a_client_has_not_seen(federation: Callable[..., Any], unseen: str) -> None:
    """By its own prototypes client 0 never predicts class 1; by the global one it may."""
    run = federation(
        one_label_each((0, 1), tests=1),
        FedPCL,
        options={"unseen": unseen},
        rounds=1,
        lr=0.5,
        epochs=30,
    )
    run.run()
    msg = evaluation_messages(run.strategy)[0]
    client = run.client()
    client.receive(msg)
    cosines = client.views()["personal"]().eval()(torch.rand(20, 4)).detach()
    assert cosines.shape == (20, 2)
    assert float(cosines.abs()[:, 0].max()) <= 1 + 1e-6
    loss = client.handle(msg).metrics["test.personal.loss"]
    if unseen == "exclude":
        assert torch.isinf(cosines[:, 1]).all()
        assert loss == float("inf")
    else:
        assert float(cosines.abs()[:, 1].max()) <= 1 + 1e-6
        assert loss != float("inf")


def test_a_client_that_failed_to_collect_takes_part_later(federation: Callable[..., Any]) -> None:
    """No other client has its class, so its samples have no loss until it has sent prototypes.

    It is evaluated by those of its model.
    """

    def fail(plan: list[Any], replies: list[Any]) -> list[Any]:
        failure = Failure(0, "collect", 1, "gone")
        return [failure if reply.pid == 0 else reply for reply in replies]

    run = federation(one_label_each((0, 1, 1)), FedPCL, rounds=2, on_failure="skip")
    run.step(alter=fail)
    assert run.strategy.weights["prototypes"]["has"].tolist() == [False, True]
    run.step()
    initial = run.workspace.initial
    kept = client_state(run, 0, UNSHARED)
    assert all(torch.equal(kept[name], initial[name]) for name in run.workspace.kept)
    assert run.strategy.weights["prototypes"]["has"].all()
    run.step()
    trained = client_state(run, 0, UNSHARED)["body.0.weight"]
    assert not torch.equal(trained, initial["body.0.weight"])


class FrozenEncoder(ToyModel):
    """The setting of the paper: a frozen encoder, and a trained projection that ends `features`."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(3, 5)
        self.head = nn.Linear(5, 2)
        self.body.requires_grad_(False)

    def features(self, x: Tensor) -> Tensor:
        projected: Tensor = self.projection(self.body(x))
        return projected


def test_a_frozen_encoder_with_a_projection(federation: Callable[..., Any]) -> None:
    run = federation(replace(toy_task(), model=FrozenEncoder), FedPCL, rounds=2).run()
    assert run.workspace.trained == ["projection.weight", "projection.bias"]
    assert run.strategy.weights["prototypes"]["mean"].shape == (2, 5)
