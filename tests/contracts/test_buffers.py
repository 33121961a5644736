"""Batch norm: what happens to running statistics, and to a batch of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedhet import trees
from fedhet.data.toy import toy_task
from fedhet.evaluation import evaluation_messages
from fedhet.messages import Broadcast, Update
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.methods.scaffold import Scaffold
from fedhet.server_opt import FedAvgM, FedOpt, ServerOptimizer
from fedhet.task import ClientData, Samples, Task

Federation = Callable[..., Any]
MEAN, VAR, COUNT = "body.1.running_mean", "body.1.running_var", "body.1.num_batches_tracked"


def listening(heard: list[Update]) -> Callable[[list[Broadcast], list[Any]], list[Any]]:
    def alter(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        heard[:] = replies
        return replies

    return alter


def kept(update: Update, name: str) -> Tensor:
    assert update.weights is not None
    return update.weights[name]


@pytest.mark.parametrize(
    "plugins", [list, lambda: [FedNormPlugin(temperature=0.05)]], ids=["fedavg", "fednorm"]
)
@pytest.mark.parametrize(
    "server_opt",
    [None, FedAvgM(beta=0.9, lr=3.0), FedOpt(kind="adam", lr=5.0)],
    ids=["none", "momentum", "adam"],
)
def test_average(federation: Federation, plugins: Any, server_opt: ServerOptimizer | None) -> None:
    """Under the weights of the parameters, whatever the server optimiser does to those; counters:
    the largest."""
    heard: list[Update] = []
    run = federation(
        toy_task(norm=True), FedAvg, plugins=plugins, server_opt=server_opt, rounds=3, epochs=2
    )
    for _ in range(3):
        run.step(listening(heard))
        total = sum(update.weight for update in heard)
        for name in (MEAN, VAR):
            expected = sum(update.weight / total * kept(update, name).double() for update in heard)
            torch.testing.assert_close(run.model[name], expected.float(), rtol=1e-6, atol=0)  # type: ignore[union-attr]
        assert (run.model[VAR] > 0).all()
        assert int(run.model[COUNT]) == max(int(kept(update, COUNT)) for update in heard)
    weights = [update.weight / total for update in heard]
    assert (weights == pytest.approx([n / 72 for n in (24, 20, 16, 12)])) == (plugins is list)


class Names(ServerOptimizer):
    """Notes what it is given."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def step(self, old: trees.Tree, new: trees.Tree) -> trees.Tree:
        assert set(old) == set(new)
        self.seen |= set(new)
        return new


@pytest.mark.parametrize("cls", [FedAvg, Scaffold])
@pytest.mark.parametrize("buffers", ["average", "local", "frozen"])
def test_server_optimisers_see_parameters_only(
    federation: Federation, cls: type, buffers: str
) -> None:
    names = Names()
    run = federation(toy_task(norm=True), cls, server_opt=names, buffers=buffers)
    run.step()
    assert names.seen == {name for name, _ in run.site.model.named_parameters()}


def test_local(federation: Federation) -> None:
    """Never sent; every client goes on from its own."""
    heard: list[Update] = []
    run = federation(toy_task(norm=True), FedAvg, buffers="local", rounds=2, batch_size=4)
    start = trees.map(torch.clone, run.model)
    plan = run.step(listening(heard))
    run.step(listening(heard))
    assert not {MEAN, VAR, COUNT} & {*(plan[0].weights or {}), *(heard[0].weights or {})}
    assert all(torch.equal(run.model[name], start[name]) for name in (MEAN, VAR, COUNT))
    own = [run.store.load(pid, 2) for pid in range(4)]
    for pid, state in enumerate(own):
        assert int(state[f"client.kept/{COUNT}"]) == 2 * (3 + pid)  # both rounds' batches
    assert all(
        not torch.equal(own[0][f"client.kept/{MEAN}"], state[f"client.kept/{MEAN}"])
        for state in own[1:]
    )


def test_local_statistics_are_those_that_a_client_is_evaluated_with(federation: Federation) -> None:
    run = federation(toy_task(norm=True), FedAvg, buffers="local", rounds=1)
    run.step()
    losses = []
    for msg in evaluation_messages(run.strategy)[:2]:
        update = run.client().handle(msg)
        assert isinstance(update, Update), update
        losses.append(update.metrics["test.personal.loss"])
        state = run.store.load(msg.pid, 1)
        model = run.site.load(
            {**run.model, **{name: state[f"client.kept/{name}"] for name in (MEAN, VAR, COUNT)}}
        ).eval()
        test = run.site.task.clients[msg.pid].test
        expected = float(run.site.task.criterion(model(test.x), test.y).detach().double().mean())
        assert losses[-1] == pytest.approx(expected, rel=1e-6)
        shared = float(
            run.site.task.criterion(run.site.load(run.model).eval()(test.x), test.y)
            .detach()
            .double()
            .mean()
        )
        assert abs(losses[-1] - shared) > 1e-4


def test_frozen(federation: Federation) -> None:
    """Never sent, never changed; training normalises by them."""
    heard: list[Update] = []
    run = federation(toy_task(norm=True), FedAvg, buffers="frozen", rounds=2)
    start = trees.map(torch.clone, run.model)
    plan = run.step(listening(heard))
    run.step()
    assert not {MEAN, VAR, COUNT} & {*(plan[0].weights or {}), *(heard[0].weights or {})}
    assert all(torch.equal(run.site.read([name])[name], start[name]) for name in (MEAN, VAR, COUNT))
    assert not torch.equal(
        run.model["body.1.weight"], start["body.1.weight"]
    )  # the affine part is a parameter
    assert not run.strategy.versions


def lone(n: int, norm: bool) -> Task:
    """One client with n samples."""
    task = toy_task(1, norm=norm)
    train = task.clients[0].train
    return Task(
        task.model, task.criterion, [ClientData(Samples(train.x[:n], train.y[:n]))], None, 2
    )


@pytest.mark.parametrize(
    ("n", "size", "steps", "counted"),
    [
        (12, 4, 3, 3),
        (9, 4, 2, 2),  # a trailing single is dropped, as the client has another batch
        (1, 4, 1, 0),  # it has not: the statistics stay as they are
        (5, 1, 5, 0),  # batches of one throughout
        (2, 2, 1, 1),
    ],
)
@pytest.mark.parametrize("norm", [True, False])
def test_a_batch_of_one(
    federation: Federation, n: int, size: int, steps: int, counted: int, norm: bool
) -> None:
    """Batch norm cannot train on a single sample; a model without it takes every batch."""
    heard: list[Update] = []
    run = federation(lone(n, norm), Scaffold, batch_size=size, epochs=2)
    run.step(listening(heard))
    assert heard[0].extras["scaffold.steps"] == 2 * (steps if norm else -(-n // size))
    assert trees.first_nonfinite(run.model) is None
    if norm:
        assert int(run.model[COUNT]) == 2 * counted
        assert torch.equal(run.model[MEAN], torch.zeros(3)) == (counted == 0)


def test_frozen_tensors_that_are_no_buffers_are_never_sent(federation: Federation) -> None:
    """A parameter with requires_grad=False keeps its common initial value."""
    task = toy_task()

    def model() -> nn.Module:
        made = toy_task().model()
        made.head.bias.requires_grad_(False)  # type: ignore[union-attr, operator]
        return made

    task.model = model
    run = federation(task, Scaffold, server_opt=FedAvgM(beta=0.5))
    before = run.model["head.bias"].clone()
    plan = run.step()
    assert "head.bias" not in plan[0].weights and "head.bias" not in plan[0].extras["scaffold.c"]
    assert torch.equal(run.model["head.bias"], before)
