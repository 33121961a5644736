"""FedBN: which models are evaluated, with which batch norm."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from methods.readouts import client_state
from torch import Tensor

from fedhet.core.client.client import UNSHARED
from fedhet.core.errors import ConfigError
from fedhet.core.groups import Evaluation
from fedhet.core.server.evaluation import evaluation_messages, global_scores
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fedbn import FedBN
from fedhet.methods.fednorm import FedNormPlugin

Federation = Callable[..., Any]
STATISTICS = ["body.1.running_mean", "body.1.running_var"]
BN = ["body.1.weight", "body.1.bias", *STATISTICS]
SHARED = ["body.0.weight", "body.0.bias", "head.weight", "head.bias"]


def view_losses(run: Any) -> list[dict[str, float]]:
    """The test loss of each view, by client."""
    losses = []
    for msg in evaluation_messages(run.strategy):
        metrics = run.client().handle(msg).metrics
        tests = {name: value for name, value in metrics.items() if name.startswith("test.")}
        losses.append(
            {name.split(".")[1]: value for name, value in tests.items() if name.endswith(".loss")}
        )
    return losses


def loss(run: Any, pid: int, tree: dict[str, Tensor]) -> float:
    """The test loss of client `pid` with these values, and the initial ones elsewhere."""
    task = run.workspace.task
    test = task.clients[pid].test
    model = task.model().eval()
    model.load_state_dict({**run.workspace.initial, **tree})
    return float(task.criterion(model(test.x), test.y).detach().double().mean())


def test_views(federation: Federation) -> None:
    """A client's own batch norm, or the initial one without participation; no global model."""
    run = federation(toy_task(norm=True), FedBN, fraction=0.5, epochs=5, lr=0.5)
    cohort = [msg.pid for msg in run.step()]
    assert run.strategy.evaluates == ("personal",)
    assert global_scores(run.strategy) == {}
    x = {name: run.model[name] for name in SHARED}
    participant = client_state(run, cohort[0], UNSHARED)
    for pid, losses in enumerate(view_losses(run)):
        own = client_state(run, pid, UNSHARED)
        assert bool(own) == (pid in cohort)
        assert losses == {"personal": pytest.approx(loss(run, pid, {**x, **own}), rel=1e-6)}
        assert abs(loss(run, pid, {**x, **participant}) - loss(run, pid, x)) > 1e-3


def test_views_with_the_mean(federation: Federation) -> None:
    """The n_k-weighted mean of the participants' batch norms makes a global model.

    Clients that have never taken part are evaluated with it.
    """
    run = federation(
        toy_task(norm=True), FedBN, options={"server_bn": "average"}, fraction=0.5, epochs=5, lr=0.5
    )
    cohort = [msg.pid for msg in run.step()]
    task = run.workspace.task
    samples = sum(task.sizes[pid] for pid in cohort)
    for name in BN:
        total = sum(
            task.sizes[pid] * client_state(run, pid, UNSHARED)[name].double() for pid in cohort
        )
        mean = (total / samples).float()
        torch.testing.assert_close(run.model[name], mean, rtol=1e-6, atol=1e-8)
    assert (run.model["body.1.running_var"] > 0).all()
    assert run.strategy.evaluates == ("global", "personal")
    model = task.model().eval()
    model.load_state_dict(run.model)
    on_test = float(task.criterion(model(task.test.x), task.test.y).detach().double().mean())
    assert global_scores(run.strategy)["loss"] == pytest.approx(on_test, rel=1e-6)
    for pid, losses in enumerate(view_losses(run)):
        own = client_state(run, pid, UNSHARED)
        expected = [loss(run, pid, run.model), loss(run, pid, {**run.model, **own})]
        assert [losses["global"], losses["personal"]] == pytest.approx(expected, rel=1e-6)
        assert (losses["global"] == losses["personal"]) == (pid not in cohort)


@pytest.mark.parametrize(("norm", "server_bn"), [(True, "average"), (False, "none")])
def test_a_global_model_can_be_fine_tuned(
    federation: Federation, norm: bool, server_bn: str
) -> None:
    run = federation(
        toy_task(norm=norm),
        FedBN,
        options={"server_bn": server_bn},
        evaluation=Evaluation(finetune_epochs=5),
        lr=0.5,
    )
    run.step()
    losses, *_ = view_losses(run)
    assert run.strategy.views[-1] == "finetuned"
    assert losses["finetuned"] < losses["global"]


def test_without_a_global_model_fine_tuning_is_refused(federation: Federation) -> None:
    message = r"eval\.finetune_epochs=5: method=fedbn"
    with pytest.raises(ConfigError, match=message):
        federation(toy_task(norm=True), FedBN, evaluation=Evaluation(finetune_epochs=5))


@pytest.mark.parametrize("server_bn", ["none", "average"])
@pytest.mark.parametrize(
    "plugins", [list, lambda: [FedNormPlugin(temperature=0.05)]], ids=["alone", "fednorm"]
)
def test_without_batch_norm_it_is_fedavg(
    federation: Federation, caplog: pytest.LogCaptureFixture, plugins: Any, server_bn: str
) -> None:
    """Bit for bit, evaluated as FedAvg, with one warning."""
    settings = {"plugins": plugins, "rounds": 3, "fraction": 0.75}
    with caplog.at_level(logging.WARNING, "fedhet"):
        bn = federation(toy_task(), FedBN, options={"server_bn": server_bn}, **settings).run()
    avg = federation(toy_task(), FedAvg, **settings).run()
    assert bn.sha256 == avg.sha256
    assert view_losses(bn) == view_losses(avg)
    assert bn.strategy.evaluates == avg.strategy.evaluates
    assert global_scores(bn.strategy) == global_scores(avg.strategy)
    (record,) = caplog.records
    assert "fedbn: the model ToyModel has no batch norm" in record.getMessage()


def test_through_the_application(launch: Callable[..., Any]) -> None:
    """States on disk are those in memory.

    acc_global is null; the clients' accuracies are those of the personal models.
    """
    lines = ["method=fedbn", "rounds=3", "fraction=0.75", "client.lr=0.3"]
    one, two = (
        launch(*lines, f"engine.workers={workers}", task=toy_task(norm=True)) for workers in (1, 2)
    )
    assert one.summary["weights_sha256"] == two.summary["weights_sha256"]
    assert one.summary["accuracy"]["last"] is None
    rows, other_rows = (
        [json.loads(line) for line in (run.dir / "rounds.jsonl").read_text().splitlines()]
        for run in (one, two)
    )
    for row, other in zip(rows, other_rows, strict=True):
        assert row["acc_global"] is None
        assert row["acc_clients_mean"] == other["acc_clients_mean"] is not None
    per_client = 4 * sum(np.prod(one.weights[name].shape) for name in SHARED)
    assert one.summary["bytes"] == {way: {"model": 3 * 3 * per_client} for way in ("up", "down")}
