"""FedNTD."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from methods.by_hand import EPOCHS, LR, SIZES, Weights, each, mean, same
from methods.three_classes import CLASSES, DATA, backward, error, logits, softmax, task
from torch import Tensor, nn
from torch.nn import functional

from fedhet.data.toy import toy_task
from fedhet.engines.vectorized import obstacle
from fedhet.errors import ConfigError
from fedhet.maths.fedntd import not_true_distillation
from fedhet.messages import LocalSettings
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fedntd import FedNTD, FedNTDPlugin

Federation = Callable[..., Any]
BETA, TAU = 0.8, 1.7


def ntd(**options: float) -> Callable[[], list[FedNTDPlugin]]:
    return lambda: [FedNTDPlugin(**options)]


def local(x: Weights, pid: int) -> Weights:
    """d KL(p || q) / d logits of q is (q - p) / tau, 0 for the label; the loss has beta tau^2 in
    front."""
    inputs, y = DATA[pid]
    w = x
    for _ in range(EPOCHS):
        pull = np.zeros((len(y), CLASSES))
        for i, label in enumerate(y):
            others = [c for c in range(CLASSES) if c != label]
            p, q = (softmax(logits(model, inputs)[i : i + 1, others] / TAU)[0] for model in (x, w))
            pull[i, others] = BETA * TAU * (q - p)
        g = backward(w, inputs, error(logits(w, inputs), y) + pull)
        w = each(lambda a, b: a - LR * b, w, g)
    return w


def test_by_hand(federation: Federation) -> None:
    """Lee et al., algorithm 1: the global model of the round is the teacher; FedAvg aggregates."""
    run = federation(
        task(),
        FedNTD,
        plugins=ntd(beta=BETA, tau=TAU),
        lr=LR,
        epochs=EPOCHS,
        batch_size=99,
        rounds=3,
        fraction=0.6,
    )
    for _ in range(3):
        x = {name: t.numpy().copy() for name, t in run.model.items()}
        cohort = [msg.pid for msg in run.step()]
        same(
            {name: t.numpy() for name, t in run.model.items()},
            mean([local(x, k) for k in cohort], [SIZES[k] for k in cohort]),
        )
    assert run.strategy.versions == {}, "clients keep nothing"


def test_beta_zero_is_fedavg(federation: Federation) -> None:
    how = {"rounds": 3, "fraction": 0.75, "epochs": 2, "lr": LR, "local": {"momentum": 0.5}}
    found = [
        federation(task(), FedAvg, plugins=plugins, **how).run().sha256
        for plugins in (list, ntd(beta=0), ntd(beta=0.5))
    ]
    assert found[0] == found[1] != found[2]


def test_two_classes_are_fedavg(federation: Federation) -> None:
    """One class is left beside the label: its share is 1 on both sides."""
    distilled, plain = (
        federation(toy_task(norm=True), FedAvg, plugins=plugins, rounds=2).run()
        for plugins in (ntd(beta=5), list)
    )
    assert distilled.sha256 == plain.sha256


def test_the_method_is_the_plugin(launch: Callable[..., Any]) -> None:
    lines = ["rounds=2", "eval.clients=false", "plugin.fedntd.beta=2"]
    runs = [
        launch(*lines, *more, task=task())
        for more in (["method=fedntd"], ["method=fedavg", "plugin=[fedntd]"])
    ]
    assert runs[0].summary["weights_sha256"] == runs[1].summary["weights_sha256"]


@pytest.mark.parametrize("buffers", ["average", "local", "frozen"])
def test_the_teacher_is_in_eval_mode_with_the_statistics_of_evaluation(
    federation: Federation, buffers: str
) -> None:
    """One step on one batch in the second round, by modules of their own."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Linear(3, 4, dtype=torch.float64),
                nn.BatchNorm1d(4, dtype=torch.float64),
                nn.Linear(4, CLASSES, dtype=torch.float64),
            )

        # neither features nor a head: logits are all that it takes
        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

    run = federation(
        replace(task(), model=Net),
        FedAvg,
        plugins=ntd(beta=2),
        buffers=buffers,
        batch_size=99,
        rounds=2,
        lr=0.5,
    )
    run.step()
    for msg in run.strategy.plan(2):
        kept = run.store.load(msg.pid, run.strategy.versions.get(msg.pid, 0)) or {}
        received = {
            **run.site.initial,
            **{name.removeprefix("client.kept/"): t for name, t in kept.items()},
            **msg.weights,
        }
        student, teacher = Net().train(buffers != "frozen"), Net().eval()
        student.load_state_dict(received)
        teacher.load_state_dict(received)
        x, y = (torch.from_numpy(a) for a in DATA[msg.pid])
        q = student(x)
        loss = (
            functional.cross_entropy(q, y)
            + 2 * not_true_distillation(q, teacher(x).detach(), y, 1.0).mean()
        )
        expected = {
            name: p.detach() - 0.5 * g
            for (name, p), g in zip(
                student.named_parameters(),
                torch.autograd.grad(loss, list(student.parameters())),
                strict=True,
            )
        }
        found = run.client().handle(msg).weights
        for name, t in expected.items():
            torch.testing.assert_close(found[name], t, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("classes", [0, 1])
def test_a_task_without_classes_is_refused_at_the_start(
    federation: Federation, classes: int
) -> None:
    with pytest.raises(ConfigError, match=rf"fedntd .*the task has {classes} classes"):
        federation(replace(task(), classes=classes), FedAvg, plugins=ntd())


@pytest.mark.parametrize("options", [{"beta": -1}, {"beta": True}, {"tau": 0}])
def test_bad_options_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"plugin\.fedntd\.{next(iter(options))}="):
        FedNTDPlugin(**options)


def test_clients_are_not_trained_as_one(federation: Federation) -> None:
    assert (
        obstacle(federation(task(), FedAvg, plugins=ntd()).client(), LocalSettings(lr=0.1))
        == "plugin 'fedntd' has the hook losses"
    )
