"""FedBN: the rounds, what travels, and what clients keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from asking import packed_weights
from methods.readouts import client_state
from torch import Tensor, nn

from fedhet.core.client.client import UNSHARED
from fedhet.core.client.context import ClientContext
from fedhet.core.errors import ConfigError
from fedhet.core.server.evaluation import evaluation_messages
from fedhet.core.server.server_opt import FedAvgM
from fedhet.core.task import Task
from fedhet.data.toy import toy_task
from fedhet.methods.fedbn import FedBN, norm_names
from fedhet.methods.fedlex import FedLExPlugin
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.methods.fedprox import FedProxPlugin
from fedhet.models import ResNet18

Federation = Callable[..., Any]
FLOATING = [f"body.1.{name}" for name in ("weight", "bias", "running_mean", "running_var")]
BN = [*FLOATING, "body.1.num_batches_tracked"]
SHARED = ["body.0.weight", "body.0.bias", "head.weight", "head.bias"]


def test_batch_norms_are_found_by_type() -> None:
    """Those of a residual network's shortcuts too, whose names do not say so; not group norm."""
    names = norm_names(ResNet18(shape=(1, 8, 8), classes=3, norm="batch"))
    assert len(names) == 5 * 20
    assert "body.layer2.0.downsample.1.weight" in names
    assert "body.layer2.0.downsample.0.weight" not in names
    assert norm_names(ResNet18(shape=(1, 8, 8), classes=3, norm="group")) == []
    without_parameters = norm_names(nn.BatchNorm1d(3, affine=False))
    assert without_parameters == ["running_mean", "running_var", "num_batches_tracked"]


@pytest.mark.parametrize("batch_size", [4, 99])
def test_by_hand(federation: Federation, batch_size: int) -> None:
    """Li et al., algorithm 1, with torch's own optimiser.

    All layers but batch norm are averaged, weighted by n_k as in FedAvg.
    """
    run = federation(
        toy_task(norm=True), FedBN, rounds=3, fraction=0.75, epochs=2, batch_size=batch_size
    )
    task = run.workspace.task
    own = [{name: run.model[name].clone() for name in BN} for _ in range(4)]

    def trained(x: dict[str, Tensor], msg: Any) -> dict[str, Tensor]:
        model = task.model()
        model.load_state_dict({**x, **own[msg.pid]})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = task.clients[msg.pid].train
        orders = ClientContext(run.workspace, msg)._orders(task.sizes[msg.pid])
        for order in (next(orders), next(orders)):
            for batch in order.split(batch_size):
                optimizer.zero_grad()
                task.criterion(model.train()(data.x[batch]), data.y[batch]).mean().backward()
                optimizer.step()
        return model.state_dict()

    for _ in range(3):
        x = {name: run.model[name].clone() for name in SHARED}
        sums = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in x.items()}
        samples = 0
        for msg in run.step():
            end = trained(x, msg)
            own[msg.pid] = {name: end[name].clone() for name in BN}
            n = task.sizes[msg.pid]
            samples += n
            sums = {name: t + n * end[name].double() for name, t in sums.items()}
        for name, t in sums.items():
            torch.testing.assert_close(run.model[name].double(), t / samples, rtol=1e-6, atol=1e-7)
        for pid in range(4):
            kept = client_state(run, pid, UNSHARED)
            assert all(torch.equal(t, own[pid][name]) for name, t in kept.items())
    assert not torch.equal(own[0][BN[0]], own[1][BN[0]])


@pytest.mark.parametrize("server_bn", ["none", "average"])
def test_what_travels(federation: Federation, server_bn: str) -> None:
    """Nothing of batch norm, neither down nor up; up as an extra only with server_bn=average."""
    run = federation(toy_task(norm=True), FedBN, options={"server_bn": server_bn}, rounds=2)
    run.step()
    for msg in run.strategy.plan(2).messages:
        reply = run.client().handle(msg)
        assert list(msg.weights) == list(reply.weights) == SHARED
        assert packed_weights(msg, reply) == (SHARED, SHARED)
        extras = {name: list(tree) for name, tree in reply.extras.items()}
        assert extras == ({"fedbn.bn": FLOATING} if server_bn == "average" else {})
        assert "fedbn.bn" not in msg.extras


@pytest.mark.parametrize("buffers", ["average", "local"])
@pytest.mark.parametrize(
    "plugins",
    [list, lambda: [FedLExPlugin(e_exp=2), FedNormPlugin(temperature=0.05), FedProxPlugin(mu=0.5)]],
    ids=["alone", "plugins"],
)
def test_reporting_changes_no_training(federation: Federation, plugins: Any, buffers: str) -> None:
    """Nor does the policy for other buffers; a server optimiser sees what is shared."""
    settings = {"plugins": plugins, "rounds": 4, "fraction": 0.75, "epochs": 2}
    plain = federation(toy_task(norm=True), FedBN, **settings, server_opt=FedAvgM(beta=0.5))
    reporting = federation(
        toy_task(norm=True),
        FedBN,
        **settings,
        server_opt=FedAvgM(beta=0.5),
        buffers=buffers,
        options={"server_bn": "average"},
    )
    for run in (plain, reporting):
        run.run()
        for msg in evaluation_messages(run.strategy):
            run.client().handle(msg)
    assert all(torch.equal(plain.model[name], reporting.model[name]) for name in SHARED)
    for pid in range(4):
        kept, expected = (client_state(run, pid, UNSHARED) for run in (reporting, plain))
        assert kept.keys() == expected.keys() and list(expected) == BN
        assert all(torch.equal(t, kept[name]) for name, t in expected.items())


def test_a_bad_mean_is_the_clients_failure(federation: Federation) -> None:
    run = federation(
        toy_task(norm=True), FedBN, options={"server_bn": "average"}, on_failure="skip"
    )

    def spoil(plan: list[Any], replies: list[Any]) -> list[Any]:
        replies[1].extras["fedbn.bn"]["body.1.running_var"][0] = float("nan")
        return replies

    spoilt = run.step(spoil)[1].pid
    (failure,) = run.current.failures
    assert failure.pid == spoilt and "NaN" in failure.cause


def with_buffer() -> Task:
    """A model with batch norm, and with a buffer that does not belong to it."""

    def model() -> nn.Module:
        module = toy_task(norm=True).model()
        module.register_buffer("scale", torch.ones(2))
        return module

    return replace(toy_task(), model=model)


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_other_buffers_follow_the_policy(federation: Federation, buffers: str) -> None:
    run = federation(with_buffer(), FedBN, buffers=buffers)
    plan = run.step()
    sent = "scale" in plan[0].weights
    kept = "scale" in client_state(run, 0, UNSHARED)
    assert sent == (buffers == "average") != kept


def test_frozen_statistics_are_refused(federation: Federation) -> None:
    with pytest.raises(ConfigError, match=r"buffers=frozen: method=fedbn.*buffers=average"):
        federation(toy_task(norm=True), FedBN, buffers="frozen")


def test_a_bad_option_is_named(federation: Federation) -> None:
    with pytest.raises(ConfigError, match=r"method\.server_bn=mean"):
        federation(toy_task(), FedBN, options={"server_bn": "mean"})
