"""FedProx."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from maths.cases import named_case
from methods.by_hand import SIZES, Case, Weights, each, local_sgd, mean, same
from methods.readouts import place
from torch import nn

from fedhet.core import trees
from fedhet.core.client import training
from fedhet.core.errors import ConfigError
from fedhet.data.toy import ToyModel, toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fedprox import FedProx, FedProxPlugin

MU = 0.8


def test_by_hand(case: Callable[..., Case]) -> None:
    """Li et al., eq. 2: min F_k(w) + mu/2 |w - x|^2, whose gradient has mu (w - x) more."""
    for x, cohort, new in case(FedProx, plugins=lambda: [FedProxPlugin(mu=MU)]).rounds():

        def pulled(g: Weights, w: Weights, x: Weights = x) -> Weights:
            return each(lambda a, b, c: a + MU * (b - c), g, w, x)

        ends = [local_sgd(x, k, pulled) for k in cohort]
        same(new, mean(ends, [SIZES[k] for k in cohort]))


def test_without_a_factor_it_is_fedavg(federation: Callable[..., Any]) -> None:
    """mu = 0, batch norm included."""
    how = {"rounds": 2, "epochs": 2}
    task = toy_task(norm=True)
    fedavg = federation(task, FedAvg, **how).run()
    for mu, equal in ((0.0, True), (MU, False)):
        fedprox = federation(task, FedProx, plugins=lambda mu=mu: [FedProxPlugin(mu=mu)], **how)
        assert (fedprox.run().sha256 == fedavg.sha256) is equal


def test_it_pulls_each_parameter_towards_the_received_one(federation: Callable[..., Any]) -> None:
    """A parameter that the model froze is left out, also where it comes before the others."""

    def frozen() -> nn.Module:
        model = ToyModel()
        model.body[0].weight.requires_grad_(False)
        return model

    task = toy_task()
    task.model = frozen
    plugin = FedProxPlugin(mu=MU)
    run = federation(task, FedProx, plugins=lambda: [plugin])
    msg = run.strategy.plan(1).messages[0]
    (term,) = plugin.terms(*place(run, msg, plugin))
    assert term.kind == "gradient"
    trained = run.workspace.trained
    params = {name: msg.weights[name] + i for i, name in enumerate(trained)}
    grads = trees.map(torch.zeros_like, params)
    training.add(term, grads, params, term.own)
    assert list(grads) == trained and len(trained) == 3
    for i, g in enumerate(grads.values()):
        torch.testing.assert_close(g, torch.full_like(g, MU * i), msg=trained[i])


def test_a_bad_factor_is_named() -> None:
    for mu in [-0.1, float("nan"), "0.1", None]:
        with named_case(mu), pytest.raises(ConfigError, match=r"plugin\.fedprox\.mu="):
            FedProxPlugin(mu=mu)
