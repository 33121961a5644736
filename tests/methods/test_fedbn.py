"""FedBN."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedhet.data.toy import toy_task
from fedhet.errors import ConfigError
from fedhet.evaluation import evaluation_messages, global_scores
from fedhet.flower import wire
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fedbn import NORMS, FedBN, names
from fedhet.methods.fedlex import FedLExPlugin
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.methods.fedprox import FedProxPlugin
from fedhet.models import ResNet18
from fedhet.server_opt import FedAvgM
from fedhet.task import Task

Federation = Callable[..., Any]
BN = [
    f"body.1.{name}"
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
]
SHARED = ["body.0.weight", "body.0.bias", "head.weight", "head.bias"]


def kept(run: Any, pid: int) -> dict[str, Tensor]:
    state = run.store.load(pid, run.strategy.versions.get(pid, 0)) or {}
    return {name.removeprefix("client.kept/"): t for name, t in state.items()}


def test_batch_norms_are_found_by_type() -> None:
    """In a residual network also those of the shortcuts, whose names do not say so; group norm is
    none."""
    resnet = ResNet18(shape=(1, 8, 8), classes=3, norm="batch")
    found = names(resnet)
    assert (
        len(found) == 5 * 20
        and "body.layer2.0.downsample.1.weight" in found
        and "body.layer2.0.downsample.0.weight" not in found
    )
    assert names(ResNet18(shape=(1, 8, 8), classes=3, norm="group")) == []
    assert names(nn.BatchNorm1d(3, affine=False)) == [
        "running_mean",
        "running_var",
        "num_batches_tracked",
    ]


@pytest.mark.parametrize("batch_size", [4, 99])
def test_by_hand(federation: Federation, batch_size: int) -> None:
    """Li et al., algorithm 1, with torch's own optimiser: all layers but batch norm are averaged,
    by n_k as in FedAvg."""
    run = federation(
        toy_task(norm=True), FedBN, rounds=3, fraction=0.75, epochs=2, batch_size=batch_size
    )
    task = run.site.task
    own: list[dict[str, Tensor]] = [
        {name: run.model[name].clone() for name in BN} for _ in range(4)
    ]
    for _ in range(3):
        x = {name: run.model[name].clone() for name in SHARED}
        total, expected = (
            0,
            {name: torch.zeros_like(t, dtype=torch.float64) for name, t in x.items()},
        )
        for msg in run.step():
            model = task.model()
            model.load_state_dict({**x, **own[msg.pid]})
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            client = run.client()
            client.msg, client.pid = msg, msg.pid
            data, orders = task.clients[msg.pid].train, client.orders(task.sizes[msg.pid])
            for order in (next(orders), next(orders)):
                for batch in order.split(batch_size):
                    optimizer.zero_grad()
                    task.criterion(model.train()(data.x[batch]), data.y[batch]).mean().backward()
                    optimizer.step()
            ended = model.state_dict()
            own[msg.pid] = {name: ended[name].clone() for name in BN}
            total += task.sizes[msg.pid]
            expected = {
                name: t + task.sizes[msg.pid] * ended[name].double() for name, t in expected.items()
            }
        for name, t in expected.items():
            torch.testing.assert_close(run.model[name].double(), t / total, rtol=1e-6, atol=1e-7)
        for pid in range(4):
            assert all(torch.equal(t, own[pid][name]) for name, t in kept(run, pid).items())
    assert not torch.equal(own[0][BN[0]], own[1][BN[0]])


@pytest.mark.parametrize("server_bn", ["none", "average"])
def test_what_travels(federation: Federation, server_bn: str) -> None:
    """Down and up: nothing of batch norm, neither parameters nor statistics; up as an extra only
    where it was asked for."""
    run = federation(toy_task(norm=True), FedBN, options={"server_bn": server_bn}, rounds=2)
    run.step()
    for msg in run.strategy.plan(2):
        reply = run.client().handle(msg)
        assert list(msg.weights) == list(reply.weights) == SHARED
        assert len(wire.write_broadcast(msg)[0]) == len(wire.reply_arrays(reply)[0]) == 4
        assert {name: list(tree) for name, tree in reply.extras.items()} == (
            {NORMS: BN[:4]} if server_bn == "average" else {}
        )
        assert NORMS not in msg.extras


@pytest.mark.parametrize("buffers", ["average", "local"])
@pytest.mark.parametrize(
    "plugins",
    [list, lambda: [FedLExPlugin(e_exp=2), FedNormPlugin(temperature=0.05), FedProxPlugin(mu=0.5)]],
    ids=["alone", "plugins"],
)
def test_reporting_changes_no_training(federation: Federation, plugins: Any, buffers: str) -> None:
    """Nor does the policy for other buffers; a server optimiser sees what is shared."""
    how = {"plugins": plugins, "rounds": 4, "fraction": 0.75, "epochs": 2}
    plain = federation(toy_task(norm=True), FedBN, **how, server_opt=FedAvgM(beta=0.5))
    other = federation(
        toy_task(norm=True),
        FedBN,
        **how,
        server_opt=FedAvgM(beta=0.5),
        buffers=buffers,
        options={"server_bn": "average"},
    )
    for run in (plain, other):
        run.run()
        for msg in evaluation_messages(run.strategy):
            run.client().handle(msg)
    assert all(torch.equal(plain.model[name], other.model[name]) for name in SHARED)
    for pid in range(4):
        assert kept(plain, pid).keys() == kept(other, pid).keys() and list(kept(plain, pid)) == BN
        assert all(torch.equal(t, kept(other, pid)[name]) for name, t in kept(plain, pid).items())


def losses(run: Any) -> list[dict[str, float]]:
    """Test loss of each view, by client."""
    found = [run.client().handle(msg).metrics for msg in evaluation_messages(run.strategy)]
    return [
        {
            name.split(".")[1]: value
            for name, value in metrics.items()
            if name.startswith("test.") and name.endswith(".loss")
        }
        for metrics in found
    ]


def loss(run: Any, pid: int, tree: dict[str, Tensor]) -> float:
    task, test = run.site.task, run.site.task.clients[pid].test
    model = task.model().eval()
    model.load_state_dict({**run.site.initial, **tree})
    return float(task.criterion(model(test.x), test.y).detach().double().mean())


def test_views(federation: Federation) -> None:
    """A client's own batch norm, the initial one where it has never taken part; there is no global
    model."""
    run = federation(toy_task(norm=True), FedBN, fraction=0.5, epochs=5, lr=0.5)
    cohort = [msg.pid for msg in run.step()]
    assert run.strategy.evaluates == ("personal",) and global_scores(run.strategy) == {}
    x = {name: run.model[name] for name in SHARED}
    for pid, found in enumerate(losses(run)):
        assert bool(kept(run, pid)) == (pid in cohort)
        assert found == {
            "personal": pytest.approx(loss(run, pid, {**x, **kept(run, pid)}), rel=1e-6)
        }
        assert abs(loss(run, pid, {**x, **kept(run, cohort[0])}) - loss(run, pid, x)) > 1e-3


def test_views_with_the_mean(federation: Federation) -> None:
    """The n_k-weighted mean of the participants' batch norms makes a global model, which who is
    unseen is evaluated with."""
    run = federation(
        toy_task(norm=True), FedBN, options={"server_bn": "average"}, fraction=0.5, epochs=5, lr=0.5
    )
    cohort = [msg.pid for msg in run.step()]
    n = [run.site.task.sizes[pid] for pid in cohort]
    mean = {
        name: (
            sum(k * kept(run, pid)[name].double() for k, pid in zip(n, cohort, strict=True))
            / sum(n)
        )
        for name in BN[:4]
    }
    for name, t in mean.items():
        torch.testing.assert_close(run.model[name], t.float(), rtol=1e-6, atol=1e-8)
    assert (run.model[BN[3]] > 0).all() and run.strategy.evaluates == ("global", "personal")
    task = run.site.task
    model = task.model().eval()
    model.load_state_dict(run.model)
    on_test = float(task.criterion(model(task.test.x), task.test.y).detach().double().mean())
    assert global_scores(run.strategy)["loss"] == pytest.approx(on_test, rel=1e-6)
    for pid, found in enumerate(losses(run)):
        expected = [loss(run, pid, run.model), loss(run, pid, {**run.model, **kept(run, pid)})]
        assert [found["global"], found["personal"]] == pytest.approx(expected, rel=1e-6)
        assert (found["global"] == found["personal"]) == (pid not in cohort)


@pytest.mark.parametrize(("norm", "server_bn"), [(True, "average"), (False, "none")])
def test_a_global_model_can_be_fine_tuned(
    federation: Federation, norm: bool, server_bn: str
) -> None:
    run = federation(
        toy_task(norm=norm), FedBN, options={"server_bn": server_bn}, finetune_epochs=5, lr=0.5
    )
    run.step()
    found, *_ = losses(run)
    assert run.strategy.views[-1] == "finetuned" and found["finetuned"] < found["global"]


def test_without_a_global_model_there_is_none_to_fine_tune(federation: Federation) -> None:
    with pytest.raises(
        ConfigError, match=r"eval\.finetune_epochs=5: method=fedbn has no global model"
    ):
        federation(toy_task(norm=True), FedBN, finetune_epochs=5)


def test_a_bad_mean_is_the_clients_failure(federation: Federation) -> None:
    run = federation(
        toy_task(norm=True), FedBN, options={"server_bn": "average"}, on_failure="skip"
    )

    def spoil(plan: list[Any], replies: list[Any]) -> list[Any]:
        replies[1].extras[NORMS][BN[3]][0] = float("nan")
        return replies

    bad = run.step(spoil)[1].pid
    assert [(failure.pid, "NaN" in failure.cause) for failure in run.strategy.current.failures] == [
        (bad, True)
    ]


@pytest.mark.parametrize("server_bn", ["none", "average"])
@pytest.mark.parametrize(
    "plugins", [list, lambda: [FedNormPlugin(temperature=0.05)]], ids=["alone", "fednorm"]
)
def test_without_batch_norm_it_is_fedavg(
    federation: Federation, caplog: pytest.LogCaptureFixture, plugins: Any, server_bn: str
) -> None:
    """Bit for bit, evaluated as such, and said once."""
    with caplog.at_level(logging.WARNING, "fedhet"):
        bn = federation(
            toy_task(),
            FedBN,
            plugins=plugins,
            options={"server_bn": server_bn},
            rounds=3,
            fraction=0.75,
        ).run()
    avg = federation(toy_task(), FedAvg, plugins=plugins, rounds=3, fraction=0.75).run()
    assert (
        bn.sha256 == avg.sha256
        and losses(bn) == losses(avg)
        and bn.strategy.evaluates == avg.strategy.evaluates
    )
    assert global_scores(bn.strategy) == global_scores(avg.strategy)
    assert [record.getMessage() for record in caplog.records] == [
        "fedbn: the model ToyModel has no batch norm, so this is FedAvg"
    ]


def with_buffer() -> Task:
    """Batch norm, and a buffer that is none of its own."""

    def model() -> nn.Module:
        made = toy_task(norm=True).model()
        made.register_buffer("scale", torch.ones(2))
        return made

    return replace(toy_task(), model=model)


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_other_buffers_follow_the_policy(federation: Federation, buffers: str) -> None:
    run = federation(with_buffer(), FedBN, buffers=buffers)
    plan = run.step()
    assert ("scale" in plan[0].weights) == (buffers == "average") != ("scale" in kept(run, 0))


def test_frozen_statistics_are_refused(federation: Federation) -> None:
    with pytest.raises(ConfigError, match=r"buffers=frozen: method=fedbn.*buffers=average"):
        federation(toy_task(norm=True), FedBN, buffers="frozen")


def test_a_bad_option_is_named(federation: Federation) -> None:
    with pytest.raises(ConfigError, match=r"method\.server_bn=mean"):
        federation(toy_task(), FedBN, options={"server_bn": "mean"})


def test_through_the_application(launch: Callable[..., Any]) -> None:
    """States on disk are those in memory; acc_global is null, the clients' accuracies are the
    personal ones."""
    import json

    lines = ["method=fedbn", "rounds=3", "fraction=0.75", "client.lr=0.3"]
    one, two = (
        launch(*lines, f"engine.workers={workers}", task=toy_task(norm=True)) for workers in (1, 2)
    )
    assert (
        one.summary["weights_sha256"] == two.summary["weights_sha256"]
        and one.summary["accuracy"]["last"] is None
    )
    rows = [
        [json.loads(line) for line in (run.dir / "rounds.jsonl").read_text().splitlines()]
        for run in (one, two)
    ]
    for ours, theirs in zip(*rows, strict=True):
        assert (
            ours["acc_global"] is None
            and ours["acc_clients_mean"] == theirs["acc_clients_mean"] is not None
        )
    per_client = 4 * sum(np.prod(one.weights[name].shape) for name in SHARED)
    assert one.summary["bytes"] == {way: {"model": 3 * 3 * per_client} for way in ("up", "down")}
