"""Batch norm: running statistics, and batches of one. Frozen and tied parameters."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from fedhet.core import trees
from fedhet.core.errors import ConfigError, RunFailed
from fedhet.core.kernel import State
from fedhet.core.messages import Broadcast, Upload
from fedhet.core.server.evaluation import evaluation_messages
from fedhet.core.server.server_opt import FedAvgM, FedOpt, ServerOptimizer
from fedhet.core.task import ClientData, Samples, Task
from fedhet.core.workspace import Workspace
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fedbn import FedBN
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.methods.scaffold import Scaffold

Federation = Callable[..., Any]
MEAN, VAR, COUNT = "body.1.running_mean", "body.1.running_var", "body.1.num_batches_tracked"


def listening(heard: list[Upload]) -> Callable[[list[Broadcast], list[Any]], list[Any]]:
    def alter(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        heard[:] = replies
        return replies

    return alter


def test_a_negative_variance_is_refused(federation: Federation) -> None:
    """Among the weights, and among the extras of FedBN."""

    def falsify(plan: list[Broadcast], replies: list[Any]) -> list[Any]:
        tree = replies[-1].weights if VAR in replies[-1].weights else replies[-1].extras["fedbn.bn"]
        tree[VAR] = tree[VAR] - 10
        return replies

    for method, options in ((FedAvg, {}), (FedBN, {"server_bn": "average"})):
        run = federation(toy_task(norm=True), method, options=options)
        with pytest.raises(RunFailed, match=rf"client 0 .*{re.escape(VAR)}.*>= 0"):
            run.step(falsify)


@pytest.mark.parametrize(
    "plugins", [list, lambda: [FedNormPlugin(temperature=0.05)]], ids=["fedavg", "fednorm"]
)
@pytest.mark.parametrize(
    "server_opt",
    [None, FedAvgM(beta=0.9, lr=3.0), FedOpt(kind="adam", lr=5.0)],
    ids=["none", "momentum", "adam"],
)
def test_average(federation: Federation, plugins: Any, server_opt: ServerOptimizer | None) -> None:
    """Statistics are averaged under the parameters' weights; a counter becomes the largest.

    No server optimiser changes them.
    """
    heard: list[Upload] = []
    run = federation(
        toy_task(norm=True), FedAvg, plugins=plugins, server_opt=server_opt, rounds=3, epochs=2
    )
    for _ in range(3):
        run.step(listening(heard))
        total = sum(update.weight for update in heard)
        for name in (MEAN, VAR):
            terms = [update.weight / total * update.weights[name].double() for update in heard]
            expected = torch.stack(terms).sum(0).float()
            torch.testing.assert_close(run.model[name], expected, rtol=1e-6, atol=0)
        assert (run.model[VAR] > 0).all()
        assert int(run.model[COUNT]) == max(int(update.weights[COUNT]) for update in heard)
    weights = [update.weight / total for update in heard]
    by_size = pytest.approx([n / 72 for n in (24, 20, 16, 12)])
    assert (weights == by_size) == (plugins is list)


@dataclass(frozen=True, kw_only=True)
class Names(ServerOptimizer):
    """Notes the names of the tensors that it is given."""

    def step(
        self, state: State, old: trees.AnyTree, new: trees.AnyTree
    ) -> tuple[trees.Tree, State]:
        assert set(old) == set(new)
        return dict(new), {"seen": list(new)}


@pytest.mark.parametrize("cls", [FedAvg, Scaffold])
@pytest.mark.parametrize("buffers", ["average", "local", "frozen"])
def test_server_optimisers_see_parameters_only(
    federation: Federation, cls: type, buffers: str
) -> None:
    run = federation(toy_task(norm=True), cls, server_opt=Names(), buffers=buffers)
    run.step()
    seen = run.strategy.run.states["server_opt"]["seen"]
    assert set(seen) == {name for name, _ in run.workspace.model.named_parameters()}


def test_local(federation: Federation) -> None:
    """They are never sent; every client continues from its own."""
    heard: list[Upload] = []
    run = federation(toy_task(norm=True), FedAvg, buffers="local", rounds=2, batch_size=4)
    start = trees.map(torch.clone, run.model)
    plan = run.step(listening(heard))
    run.step(listening(heard))
    assert not {MEAN, VAR, COUNT} & {*plan[0].weights, *heard[0].weights}
    assert all(torch.equal(run.model[name], start[name]) for name in (MEAN, VAR, COUNT))
    states = [run.store.load(pid, 2) for pid in range(4)]
    for pid, state in enumerate(states):
        assert int(state[f"client.kept/{COUNT}"]) == 2 * (3 + pid)  # both rounds' batches
    means = [state[f"client.kept/{MEAN}"] for state in states]
    assert not any(torch.equal(means[0], mean) for mean in means[1:])


def test_a_client_is_evaluated_with_its_local_statistics(federation: Federation) -> None:
    run = federation(toy_task(norm=True), FedAvg, buffers="local", rounds=1)
    run.step()
    task = run.workspace.task
    for msg in evaluation_messages(run.strategy)[:2]:
        update = run.client().handle(msg)
        assert isinstance(update, Upload), update
        loss = update.metrics["test.personal.loss"]
        test = task.clients[msg.pid].test

        def mean_loss(weights: trees.Tree, test: Samples = test) -> float:
            model = run.workspace.load(weights).eval()
            return float(task.criterion(model(test.x), test.y).detach().double().mean())

        state = run.store.load(msg.pid, 1)
        own = {name: state[f"client.kept/{name}"] for name in (MEAN, VAR, COUNT)}
        assert loss == pytest.approx(mean_loss({**run.model, **own}), rel=1e-6)
        assert abs(loss - mean_loss(run.model)) > 1e-4


def test_frozen(federation: Federation) -> None:
    """They are never sent and never changed; training normalises by them."""
    heard: list[Upload] = []
    run = federation(toy_task(norm=True), FedAvg, buffers="frozen", rounds=2)
    start = trees.map(torch.clone, run.model)
    plan = run.step(listening(heard))
    run.step()
    assert not {MEAN, VAR, COUNT} & {*plan[0].weights, *heard[0].weights}
    assert all(
        torch.equal(run.workspace.read([name])[name], start[name]) for name in (MEAN, VAR, COUNT)
    )
    # The affine part is a parameter.
    assert not torch.equal(run.model["body.1.weight"], start["body.1.weight"])
    assert not run.strategy.run.versions


def lone(n: int, norm: bool) -> Task:
    """One client with n samples."""
    task = toy_task(1, norm=norm)
    train = task.clients[0].train
    client = ClientData(Samples(train.x[:n], train.y[:n]))
    return Task(task.model, task.criterion, [client], None, 2)


@pytest.mark.parametrize(
    ("n", "size", "steps", "counted"),
    [
        (12, 4, 3, 3),
        (9, 4, 2, 2),  # a trailing single sample is dropped, as the client has other batches
        (1, 4, 1, 0),  # the only sample is used, and the statistics stay as they are
        (5, 1, 5, 0),  # batches of one throughout
        (2, 2, 1, 1),
    ],
)
@pytest.mark.parametrize("norm", [True, False])
def test_a_batch_of_one(
    federation: Federation, n: int, size: int, steps: int, counted: int, norm: bool
) -> None:
    """Batch norm cannot train on a single sample; a model without it takes every batch."""
    heard: list[Upload] = []
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


def test_tied_parameters_are_refused() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(2, 2)
            self.b = nn.Linear(2, 2)
            self.b.weight = self.a.weight

    task = toy_task(2)
    task.model = Tied
    with pytest.raises(ConfigError, match=r"'b\.weight' tied"):
        Workspace(task, device=torch.device("cpu"), seed=0)
