"""Evaluations that train take the configuration's rate, however far training has lowered it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pyarrow.dataset as parquet
import pytest
import torch
from composing import composed
from torch import nn

from fedhet.core.groups import Evaluation
from fedhet.core.kernel import Plugin, Step
from fedhet.core.messages import LocalSettings
from fedhet.core.server.evaluation import evaluation_messages
from fedhet.data.toy import toy_task
from fedhet.methods.fedala import FedALA
from fedhet.methods.fedavg import FedAvg
from fedhet.runs.config import Config
from fedhet.runs.job import Job

LOWERED = {
    "cosine": ["client.schedule=cosine"],
    "lr_decay": ["client.lr_decay=0.1"],
    "psi": ["plugin=[fedgmm]", "plugin.fedgmm.psi=0.9"],
}
EPOCHS = 4


@pytest.mark.parametrize("lowered", LOWERED)
@pytest.mark.parametrize(
    ("method", "view"),
    [
        (["method=fedavg", f"eval.finetune_epochs={EPOCHS}"], "finetuned"),
        (["method=fedbabu", f"method.finetune_epochs={EPOCHS}"], "personal"),
    ],
    ids=["finetuned", "fedbabu"],
)
def test_fine_tuning_takes_the_base_rate(
    launch: Callable[..., Any], method: list[str], view: str, lowered: str
) -> None:
    """By hand: epochs of one batch from the final weights, at client.lr."""
    run = launch(
        *method,
        *LOWERED[lowered],
        "rounds=3",
        "client.lr=0.5",
        "client.epochs=1",
        "client.batch_size=1000",
        task=toy_task(),
    )
    table = parquet.dataset(run.dir / "clients").to_table().to_pandas()
    final = table[
        (table["round"] == table["round"].max())
        & (table.split == "test")
        & (table.model == view)
        & (table.metric == "loss")
    ].set_index("client")["value"]
    task = toy_task()
    assert len(final) == len(task.clients)
    for pid, client in enumerate(task.clients):
        assert client.test is not None
        model = task.model()
        model.load_state_dict(run.weights)
        sgd = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(EPOCHS):
            sgd.zero_grad()
            nn.functional.cross_entropy(model(client.train.x), client.train.y).backward()
            sgd.step()
        expected = float(nn.functional.cross_entropy(model(client.test.x), client.test.y).detach())
        assert final[pid] == pytest.approx(expected, abs=1e-5)


def test_every_evaluation_is_sent_the_settings_of_the_configuration(
    methods: dict[str, Config],
) -> None:
    """A method may have set its own (SGDM's momentum, FedPCL's clipping); none is of the round."""
    offenders = []
    for method in methods:
        settings = ["rounds=4", "client.lr=0.5", "client.lr_decay=0.5"]
        strategy = Job(composed(f"method={method}", *settings), toy_task()).strategy
        last = sum(entry.rounds for entry in strategy.timetable)
        strategy.run = replace(strategy.run, round=last)
        strategy.local = replace(strategy.setup.local, lr=0.0625)
        sent = [msg.local for msg in evaluation_messages(strategy)]
        if sent != [strategy.setup.local] * len(strategy.sizes) or sent[0].lr != 0.5:
            offenders.append(method)
    assert not offenders


@dataclass(frozen=True, kw_only=True)
class Slower(Plugin):
    """Schedules every local setting that a plug-in can."""

    name = "slower"

    def local(self, step: Step, local: LocalSettings) -> LocalSettings:
        return replace(local, lr=0.01 * local.lr, epochs=7, batch_size=1)


def test_a_plugin_schedules_training_alone(federation: Callable[..., Any]) -> None:
    run = federation(
        toy_task(),
        FedAvg,
        plugins=lambda: [Slower()],
        lr=0.4,
        evaluation=Evaluation(finetune_epochs=1),
    )
    (trained, *_) = run.step()
    assert (trained.local.lr, trained.local.epochs) == (pytest.approx(0.004), 7)
    assert {msg.local for msg in evaluation_messages(run.strategy)} == {run.strategy.setup.local}


def test_what_fedala_learns_to_be_scored_takes_no_local_rate(
    federation: Callable[..., Any],
) -> None:
    """Its mixing weights have a rate of their own, eta."""
    run = federation(toy_task(), FedALA, rounds=3, lr_decay=0.5)
    for _ in range(3):
        run.step()
    for msg in evaluation_messages(run.strategy):
        slower = replace(msg, local=replace(msg.local, lr=msg.local.lr / 100))
        assert run.client().handle(msg).metrics == run.client().handle(slower).metrics
