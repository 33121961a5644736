"""FedNTD."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from maths.cases import named_case
from methods.by_hand import EPOCHS, LR, SIZES, Weights, each, mean, same
from methods.readouts import arrays, client_state, copied
from methods.three_classes import CLASSES, DATA, backward, error, logits, softmax, task
from torch import Tensor, nn
from torch.nn import functional

from fedhet.core.errors import ConfigError
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fedntd import FedNTD, FedNTDPlugin, not_true_distillation

Federation = Callable[..., Any]
BETA = 0.8
TAU = 1.7


def ntd(**options: float) -> Callable[[], list[FedNTDPlugin]]:
    return lambda: [FedNTDPlugin(**options)]


def local(x: Weights, pid: int) -> Weights:
    """The local model after some steps on all of the client's data.

    The derivative of KL(p || q) by the logits of q is (q - p) / tau, 0 for the label; the loss has
    the factor beta tau^2.
    """
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
        x = copied(run.model)
        cohort = [msg.pid for msg in run.step()]
        expected = mean([local(x, k) for k in cohort], [SIZES[k] for k in cohort])
        same(arrays(run.model), expected)
    assert run.strategy.run.versions == {}, "clients keep nothing"


def test_beta_zero_is_fedavg(federation: Federation) -> None:
    settings = {"rounds": 3, "fraction": 0.75, "epochs": 2, "lr": LR, "local": {"momentum": 0.5}}
    fedavg, off, on = (
        federation(task(), FedAvg, plugins=plugins, **settings).run().sha256
        for plugins in (list, ntd(beta=0), ntd(beta=0.5))
    )
    assert fedavg == off != on


def test_two_classes_are_fedavg(federation: Federation) -> None:
    """One class is left beside the label, and its share is 1 on both sides."""
    distilled, plain = (
        federation(toy_task(norm=True), FedAvg, plugins=plugins, rounds=2).run()
        for plugins in (ntd(beta=5), list)
    )
    assert distilled.sha256 == plain.sha256


def test_the_method_is_the_plugin(launch: Callable[..., Any]) -> None:
    lines = ["rounds=2", "eval.clients=false", "plugin.fedntd.beta=2"]
    method = launch(*lines, "method=fedntd", task=task())
    plugin = launch(*lines, "method=fedavg", "plugin=[fedntd]", task=task())
    assert method.summary["weights_sha256"] == plugin.summary["weights_sha256"]


class NormNet(nn.Module):
    """Batch norm, and neither features nor a head: logits are all that FedNTD needs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(3, 4, dtype=torch.float64),
            nn.BatchNorm1d(4, dtype=torch.float64),
            nn.Linear(4, CLASSES, dtype=torch.float64),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@pytest.mark.parametrize("buffers", ["average", "local", "frozen"])
def test_the_teacher_is_in_eval_mode_with_the_statistics_of_evaluation(
    federation: Federation, buffers: str
) -> None:
    """One step on one batch in the second round, computed by separate modules."""
    run = federation(
        replace(task(), model=NormNet),
        FedAvg,
        plugins=ntd(beta=2),
        buffers=buffers,
        batch_size=99,
        rounds=2,
        lr=0.5,
    )
    run.step()
    for msg in run.strategy.plan(2).messages:
        own = client_state(run, msg.pid, "client.kept")
        received = {**run.workspace.initial, **own, **msg.weights}
        student = NormNet().train(buffers != "frozen")
        teacher = NormNet().eval()
        student.load_state_dict(received)
        teacher.load_state_dict(received)
        x, y = (torch.from_numpy(a) for a in DATA[msg.pid])
        output = student(x)
        distillation = not_true_distillation(output, teacher(x).detach(), y, 1.0).mean()
        loss = functional.cross_entropy(output, y) + 2 * distillation
        grads = torch.autograd.grad(loss, list(student.parameters()))
        weights = run.client().handle(msg).weights
        for (name, p), g in zip(student.named_parameters(), grads, strict=True):
            expected = p.detach() - 0.5 * g
            torch.testing.assert_close(weights[name], expected, rtol=1e-9, atol=1e-12)


def test_a_task_without_two_classes_is_refused_at_the_start(federation: Federation) -> None:
    with pytest.raises(ConfigError, match=r"fedntd .*task .*1 class"):
        federation(replace(task(), classes=1), FedAvg, plugins=ntd())


def test_bad_options_are_named() -> None:
    for options in [{"beta": -1}, {"beta": True}, {"tau": 0}]:
        with (
            named_case(options),
            pytest.raises(ConfigError, match=rf"plugin\.fedntd\.{next(iter(options))}="),
        ):
            FedNTDPlugin(**options)
