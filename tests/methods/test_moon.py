"""MOON."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from maths.cases import named_case
from methods.by_hand import EPOCHS, LR, SIZES, Weights, each, mean, same
from methods.readouts import arrays, client_state, copied, step_and_replies
from methods.three_classes import DATA, Net, backward, error, features, logits, task
from torch import Tensor, nn

from fedhet.core.errors import ConfigError
from fedhet.core.task import ClientData
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fedsgd import FedSGD
from fedhet.methods.moon import Moon, MoonPlugin, contrastive

Federation = Callable[..., Any]
MU = 3.0
TAU = 0.7
PREVIOUS = "moon.previous"  # client state


def moon(**options: float) -> Callable[[], list[MoonPlugin]]:
    return lambda: [MoonPlugin(**options)]


def cosine(z: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The cosine of each row with the other's row, and its gradient; both 0 for zero rows."""
    a, b = (np.maximum(np.linalg.norm(t, axis=1, keepdims=True), 1e-8) for t in (z, other))
    s = (z * other).sum(1, keepdims=True) / (a * b)
    return s, other / (a * b) - s * z / a**2


def local(x: Weights, previous: Weights, pid: int) -> tuple[Weights, float]:
    """(The local model, the mean of the term) after some steps on all of the client's data."""
    inputs, y = DATA[pid]
    w = x
    terms = []
    for _ in range(EPOCHS):
        z = features(w, inputs)
        s_g, d_g = cosine(z, features(x, inputs))
        s_p, d_p = cosine(z, features(previous, inputs))
        e_g, e_p = np.exp(s_g / TAU), np.exp(s_p / TAU)
        terms.append(np.mean(-np.log(e_g / (e_g + e_p))))
        d_features = MU * e_p / (e_g + e_p) * (d_p - d_g) / TAU
        g = backward(w, inputs, error(logits(w, inputs), y), d_features)
        w = each(lambda a, b: a - LR * b, w, g)
    return w, float(np.mean(terms))


def test_by_hand(federation: Federation) -> None:
    """Li, He and Song, algorithm 1: w_i^{t-1} is the client's own model of its last participation.

    In the first participation it is the global model.
    """
    run = federation(
        task(),
        Moon,
        plugins=moon(mu=MU, tau=TAU),
        lr=LR,
        epochs=EPOCHS,
        batch_size=99,
        rounds=4,
        fraction=0.6,
    )
    previous: dict[int, Weights] = {}
    for _ in range(4):
        x = copied(run.model)
        plan, replies = step_and_replies(run)
        cohort = [msg.pid for msg in plan]
        ends = {pid: local(x, previous.get(pid, x), pid) for pid in cohort}
        expected = mean([ends[k][0] for k in cohort], [SIZES[k] for k in cohort])
        same(arrays(run.model), expected)
        terms = [reply.metrics["moon.term"] for reply in replies]
        assert terms == pytest.approx([ends[k][1] for k in cohort])
        returning = set(previous) & set(cohort)
        previous |= {pid: w for pid, (w, _) in ends.items()}
        for pid, w in previous.items():
            same(arrays(client_state(run, pid, PREVIOUS)), w)
    assert returning and len(previous) > len(cohort)


def test_the_first_participation_is_fedavg(federation: Federation) -> None:
    """The term is log 2 without a gradient, so the bits are the same; then the term pulls."""
    pulled, plain = (
        federation(toy_task(norm=True), FedAvg, plugins=plugins, rounds=2)
        for plugins in (moon(), list)
    )
    for msg in pulled.strategy.plan(1).messages:
        metrics = pulled.client().handle(msg).metrics
        assert metrics["moon.term"] == pytest.approx(math.log(2))
    for equal in (True, False):
        pulled.step()
        plain.step()
        assert (pulled.sha256 == plain.sha256) is equal


def test_mu_zero_is_fedavg_and_keeps_nothing(federation: Federation) -> None:
    settings = {"rounds": 3, "fraction": 0.75, "epochs": 2, "local": {"momentum": 0.5}}
    off, plain = (
        federation(toy_task(norm=True), FedAvg, plugins=plugins, **settings).run()
        for plugins in (moon(mu=0), list)
    )
    assert off.sha256 == plain.sha256
    assert off.strategy.run.versions == {}


def test_the_method_is_the_plugin(launch: Callable[..., Any]) -> None:
    lines = ["rounds=2", "eval.clients=false", "plugin.moon.mu=2"]
    method = launch(*lines, "method=moon", task=toy_task())
    plugin = launch(*lines, "method=fedavg", "plugin=[moon]", task=toy_task())
    assert method.summary["weights_sha256"] == plugin.summary["weights_sha256"]


def test_each_client_has_its_own_previous_model_in_any_order(federation: Federation) -> None:
    """The clients of a process share one model and one pair of frozen ones."""

    def backwards(plan: list[Any], replies: list[Any]) -> list[Any]:
        return [run.client().handle(msg) for msg in reversed(plan)][::-1]

    run = federation(toy_task(), FedAvg, plugins=moon(mu=5), rounds=3, lr=0.5)
    expected = federation(toy_task(), FedAvg, plugins=moon(mu=5), rounds=3, lr=0.5).run().sha256
    assert run.run(alter=backwards).sha256 == expected


@pytest.mark.parametrize("buffers", ["average", "local", "frozen"])
def test_both_references_are_in_eval_mode_with_their_own_statistics(
    federation: Federation, buffers: str
) -> None:
    """One batch in the second round, computed by separate modules.

    The global model has the statistics with which the client would evaluate it.
    """
    make_model = toy_task(norm=True).model

    def frozen(values: dict[str, Tensor]) -> nn.Module:
        model = make_model().eval()
        model.load_state_dict(values)
        return model

    run = federation(
        toy_task(norm=True),
        FedAvg,
        plugins=moon(),
        buffers=buffers,
        batch_size=99,
        rounds=2,
        lr=0.5,
    )
    run.step()
    for msg in run.strategy.plan(2).messages:
        own = client_state(run, msg.pid, "client.kept")
        previous = client_state(run, msg.pid, PREVIOUS)
        assert set(previous) == set(
            run.workspace.initial if buffers != "frozen" else run.workspace.trained
        )
        received = {**run.workspace.initial, **own, **msg.weights}
        current = frozen(received).train(buffers != "frozen")
        x = run.workspace.train_data(msg.pid).x
        z, z_global, z_previous = (
            model.features(x).detach()
            for model in (current, frozen(received), frozen({**run.workspace.initial, **previous}))
        )
        term = run.client().handle(msg).metrics["moon.term"]
        expected = float(contrastive(z, z_global, z_previous, 0.5).mean())
        assert term == pytest.approx(expected, rel=1e-5)
        assert abs(term - math.log(2)) > 1e-4


def test_a_dead_sample_has_a_finite_gradient(federation: Federation) -> None:
    """All of its features are 0, where the cosine has no gradient."""

    def model() -> nn.Module:
        net = Net()
        nn.init.constant_(net.body.bias, -1.0)
        return net

    x, y = (torch.from_numpy(a.copy()) for a in DATA[0])
    x[0] = 0
    one_client = replace(task(), model=model, clients=[ClientData((x, y))], sizes=[len(y)])
    run = federation(one_client, FedAvg, plugins=moon(mu=2), rounds=3, lr=0.01, batch_size=2).run()
    features_after = run.workspace.model.features(x)
    assert not features_after[0].any() and features_after.any()
    assert all(torch.isfinite(t).all() for t in run.model.values())


def test_the_previous_model_under_fedsgd_is_the_received_one(federation: Federation) -> None:
    """Clients train nothing there: they send one gradient."""
    run = federation(toy_task(), FedSGD, plugins=moon(), rounds=1)
    msg, *_ = run.step()
    previous = client_state(run, msg.pid, PREVIOUS)
    assert all(torch.equal(previous[name], t) for name, t in msg.weights.items())


def test_a_client_that_takes_no_step_has_no_term(federation: Federation) -> None:
    """A plug-in may ask for no epochs."""
    _, replies = step_and_replies(federation(toy_task(), Moon, epochs=0))
    assert [reply.metrics["steps"] for reply in replies] == [0] * 4
    assert not any("moon.term" in reply.metrics for reply in replies)


def test_a_model_without_features_is_refused_at_the_start(federation: Federation) -> None:
    linear = replace(toy_task(), model=lambda: nn.Linear(4, 2))
    with pytest.raises(ConfigError, match=r"moon .*features.*Linear .*features"):
        federation(linear, FedAvg, plugins=moon())


def test_bad_options_are_named() -> None:
    for options in [{"mu": -1}, {"mu": "much"}, {"tau": 0}, {"tau": None}]:
        with (
            named_case(options),
            pytest.raises(ConfigError, match=rf"plugin\.moon\.{next(iter(options))}="),
        ):
            MoonPlugin(**options)
