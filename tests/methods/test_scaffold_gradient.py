"""SCAFFOLD with control=gradient (option I), and the fixed point of FedNorm's equation 6 under both
options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from convergence.quadratic import quadratic
from methods.plugs import Fixed, Half
from methods.test_by_hand import (
    DATA,
    EPOCHS,
    LR,
    SIZES,
    Case,
    case,
    corrected,
    each,
    gradient,
    local_sgd,
    mean,
    same,
    task,
)
from torch import Tensor
from vectors.adapter import replay

from fedhet.data.toy import toy_task
from fedhet.errors import ConfigError, RunFailed
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.methods.scaffold import Scaffold
from fedhet.plugin import Plugin
from fedhet.training import Batch

__all__ = ["case"]
CLIENTS = 6
FIVE: dict[str, Any] = {"a": [1.0, 4.0, 2.0, 0.5, 3.0], "b": [1.0, -1.0, 0.0, 2.0, 0.3]}
OPTIONS = pytest.mark.parametrize("control", ["steps", "gradient"])


def test_by_hand(case: Callable[..., Case]) -> None:
    """Karimireddy et al., algorithm 1, line 12, option I: c_i+ <- g_i(x); c moves by (1/N) sum of
    the changes."""
    running, clients = case(Scaffold, options={"control": "gradient", "lr_g": 0.7}), len(SIZES)
    zero = each(np.zeros_like, running.weights)
    c, c_i = zero, [zero] * clients
    for x, cohort, found in running.rounds():
        dy, dc = [], []
        for i in cohort:
            dy.append(each(np.subtract, local_sgd(x, i, corrected(c_i[i], c)), x))
            plus = gradient(x, *DATA[i])
            dc.append(each(np.subtract, plus, c_i[i]))
            c_i[i] = plus
        c = {name: c[name] + sum(d[name] for d in dc) / clients for name in zero}
        same(found, each(lambda a, b: a + 0.7 * b, x, mean(dy, [1] * len(dy))))


def test_momentum_decay_and_clipping_by_hand(case: Callable[..., Case]) -> None:
    """The correction is part of the gradient: g - c_i + c, clipped, plus decay, into the momentum;
    c_i is the plain g_i(x)."""
    local = {"momentum": 0.6, "weight_decay": 0.1, "clip": 0.3}
    running, clients = case(Scaffold, options={"control": "gradient"}, local=local), len(SIZES)
    zero = each(np.zeros_like, running.weights)
    c, c_i = zero, [zero] * clients
    for x, cohort, found in running.rounds():
        ends = []
        for i in cohort:
            y, d = x, zero
            for _ in range(EPOCHS):
                g = corrected(c_i[i], c)(gradient(y, *DATA[i]), y)
                scale = min(1.0, 0.3 / (np.sqrt(sum((t**2).sum() for t in g.values())) + 1e-6))
                d = each(lambda v, t, w, s=scale: 0.6 * v + s * t + 0.1 * w, d, g, y)
                y = each(lambda w, v: w - LR * v, y, d)
            ends.append(y)
        for i in cohort:
            c_i[i] = gradient(x, *DATA[i])
        c = mean(c_i, [1] * clients)
        same(found, mean(ends, [1] * len(ends)))


@pytest.mark.parametrize(
    "plugins", [list, lambda: [FedNormPlugin(temperature=0.005)]], ids=["alone", "fednorm"]
)
def test_c_is_the_mean_of_all_controls(
    federation: Callable[..., Any], plugins: Callable[[], list[Plugin]]
) -> None:
    """At partial participation, with batch norm and momentum, under lambda_j = R w_j of client j's
    last participation."""
    run = federation(
        toy_task(CLIENTS, norm=True),
        Scaffold,
        plugins=plugins,
        options={"control": "gradient"},
        rounds=8,
        fraction=0.5,
        epochs=2,
        local={"momentum": 0.5},
    )
    share = torch.ones(CLIENTS, dtype=torch.float64)
    for _ in range(7):
        run.step()
        for plugin in run.strategy.plugins:
            found = plugin.report
            share[found["pids"]] = found["weights"] * len(found["pids"])
    sent = run.strategy.plan(8)[0].extras["scaffold.c"]
    assert (
        bool(run.strategy.plugins) == (float(share.std()) > 1e-3)
        and len(run.strategy.versions) == CLIENTS
    )
    for name in sent:
        kept = [
            run.store.load(pid, run.strategy.versions[pid])[f"scaffold.c_i/{name}"].double()
            for pid in range(CLIENTS)
        ]
        torch.testing.assert_close(
            sent[name].double(),
            sum(s * t for s, t in zip(share, kept, strict=True)) / share.sum(),
            rtol=1e-5,
            atol=1e-7,
        )
    assert max(float(t.abs().max()) for t in sent.values()) > 1e-3


def test_the_extra_pass_leaves_no_trace(federation: Callable[..., Any]) -> None:
    """Controls are zero in round 1, so that both options train alike, running statistics
    included."""
    one, two = (
        federation(toy_task(norm=True), Scaffold, options={"control": control}, rounds=2)
        for control in ("gradient", "steps")
    )
    one.step()
    two.step()
    assert one.sha256 == two.sha256
    one.step()
    two.step()
    assert one.sha256 != two.sha256


def test_what_it_sends(launch: Callable[..., Any]) -> None:
    """Option I sends one tree more."""
    lines, tree = ["rounds=1", "eval.clients=false"], 4 * 92
    sent = {
        control: (
            launch("method=scaffold", f"method.control={control}", *lines, task=toy_task()).summary[
                "bytes"
            ]
        )
        for control in ("steps", "gradient")
    }
    down, up = {"model": tree, "scaffold.c": tree}, {"model": tree, "scaffold.c_plus": tree}
    assert sent["steps"] == {"down": down, "up": {**up, "scaffold.steps": 32}}
    assert sent["gradient"] == {
        "down": {**down, "scaffold.gradient": 4},
        "up": {**up, "scaffold.c_i": tree},
    }


class Weighing(Plugin):
    """Weights of the samples, which are part of the loss."""

    name = "weighing"

    def sample_weights(self, data: Any) -> Tensor:
        return torch.linspace(0, 2, len(data), dtype=torch.float64)


def test_the_control_is_the_gradient_of_the_loss_as_plugins_shape_it(
    federation: Callable[..., Any],
) -> None:
    """Sample weights are in it; a hook that scales steps is not, or the correction would be scaled
    twice."""
    plain, weighed, halved = (
        federation(task(), Scaffold, plugins=plugins, options={"control": "gradient"})
        for plugins in (list, lambda: [Weighing()], lambda: [Half()])
    )
    found = [
        next(
            r for r in (run.client().handle(m) for m in run.strategy.plan(1)) if r.pid == 1
        ).extras["scaffold.c_plus"]
        for run in (plain, weighed, halved)
    ]
    x, y = DATA[1]
    w = {name: t.numpy() for name, t in plain.model.items()}
    factors = np.linspace(0, 2, len(y))
    each_sample = [gradient(w, x[i : i + 1], y[i : i + 1]) for i in range(len(y))]
    for name in w:
        np.testing.assert_allclose(found[0][name], gradient(w, x, y)[name], rtol=1e-10, atol=1e-14)
        np.testing.assert_allclose(
            found[1][name],
            sum(f * g[name] for f, g in zip(factors, each_sample, strict=True)) / len(y),
            rtol=1e-10,
            atol=1e-14,
        )
        assert torch.equal(found[2][name], found[0][name])


@pytest.mark.parametrize("fraction", [pytest.param(1.0, marks=pytest.mark.matrix), 0.5])
@pytest.mark.parametrize("extra", [{}, {"client.momentum": 0.5}], ids=["plain", "momentum"])
@pytest.mark.parametrize("plugins", [[], ["fednorm"]], ids=["alone", "fednorm"])
def test_it_reaches_the_optimum(
    fraction: float, extra: dict[str, float], plugins: list[str]
) -> None:
    """With momentum too, which option II could not allow."""
    params = {
        "a": [1.0, 4.0],
        "b": [1.0, -1.0],
        "steps": 5,
        "lr": 0.03,
        "method": "scaffold",
        "plugins": plugins,
        "fraction": fraction,
        "rounds": 80 if fraction == 1.0 else 150,
        "method_args": {"control": "gradient", **extra},
    }
    assert replay("convergence", "quadratic", params, {})["w"] == pytest.approx(-0.6, abs=1e-9)


V = (0.2, 0.9, 0.5, 0.3)


@OPTIONS
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_the_fixed_point_of_equation_6(
    federation: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, control: str, fraction: float
) -> None:
    """methods.md 1.2: under weights v SCAFFOLD goes to the optimum of sum_i v_i f_i.

    At half participation lambda_j = R w_j is a constant of client j only where w_j does not depend
    on who else is there, so the cohorts are two pairs, drawn at random, and w is v within the pair.
    """
    a, b = FIVE["a"][:4], FIVE["b"][:4]
    v = np.array(V)
    share = v / v.sum()
    if fraction < 1:
        draws = np.random.default_rng(0)
        monkeypatch.setattr(
            "fedhet.strategy.sample_cohort", lambda *args: [[0, 1], [2, 3]][draws.integers(2)]
        )
        share = np.concatenate([v[:2] / v[:2].sum(), v[2:] / v[2:].sum()])
    done = federation(
        quadratic(a, b),
        Scaffold,
        plugins=lambda: [Fixed(V)],
        options={"control": control},
        lr=0.05,
        epochs=6,
        batch_size=1,
        rounds=60 if fraction == 1.0 else 120,
        fraction=fraction,
    ).run()
    expected, plain = float(np.average(b, weights=share * a)), float(np.average(b, weights=a))
    assert (
        float(done.model["w"]) == pytest.approx(expected, abs=1e-9) and abs(expected - plain) > 0.05
    )


@OPTIONS
def test_random_cohorts_stay_about_that_point(federation: Callable[..., Any], control: str) -> None:
    """With any three of six clients w_j depends on the others, so x does not settle; its mean is
    nearer to eq. 6 than to plain SCAFFOLD."""
    a, b, v = (
        np.array([1.0, 4.0, 2.0, 0.5, 3.0, 1.5]),
        np.array([1.0, -1.0, 0.0, 2.0, 0.3, -0.5]),
        np.array([0.5, 2.0, 1.0, 0.5, 2.0, 1.0]),
    )
    run = federation(
        quadratic(list(a), list(b)),
        Scaffold,
        plugins=lambda: [Fixed(list(v))],
        options={"control": control},
        lr=0.03,
        epochs=5,
        batch_size=1,
        rounds=150,
        fraction=0.5,
    )
    found = []
    for _ in range(150):
        run.step()
        found.append(float(run.model["w"]))
    target, plain = np.average(b, weights=v * a), np.average(b, weights=a)
    assert abs(np.mean(found[30:]) - target) < 0.5 * abs(np.mean(found[30:]) - plain)


@pytest.mark.parametrize(
    ("key", "value"),
    [("momentum", 0.9), ("weight_decay", 0.1), ("clip", 1.0), ("optimizer", "adam")],
)
def test_option_ii_names_the_way_out(federation: Callable[..., Any], key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"client\.{key}={value}.*method\.control=gradient"):
        federation(toy_task(), Scaffold, local={key: value})
    federation(
        toy_task(), Scaffold, local={key: value}, options={"control": "gradient"}, rounds=2
    ).run()


def test_fedlex_is_refused_by_option_ii_only(federation: Callable[..., Any]) -> None:
    class Lex(Half):
        name = "fedlex"

    with pytest.raises(ConfigError, match=r"scaffold refuses plugin 'fedlex'.*control=gradient"):
        federation(toy_task(), Scaffold, plugins=lambda: [Lex()])
    federation(
        toy_task(), Scaffold, plugins=lambda: [Lex()], options={"control": "gradient"}, rounds=2
    ).run()


@pytest.mark.parametrize("extra", ["scaffold.c_i", "scaffold.c_plus"])
def test_what_a_server_is_sent_is_checked(federation: Callable[..., Any], extra: str) -> None:
    def without(plan: list[Any], replies: list[Any]) -> list[Any]:
        return [
            (
                replace(r, extras={k: t for k, t in r.extras.items() if k != extra})
                if r.pid == 1
                else r
            )
            for r in replies
        ]

    with pytest.raises(RunFailed, match=rf"client 1 .*'{extra}' is missing"):
        federation(toy_task(), Scaffold, options={"control": "gradient"}).step(without)


def test_a_skipped_client_keeps_its_old_control(federation: Callable[..., Any]) -> None:
    """Its update was left out in round 2, so in round 3 it starts from the c_i that the server's
    sum holds."""

    def spoiled(plan: list[Any], replies: list[Any]) -> list[Any]:
        return [replace(r, extras={}) if r.pid == 1 else r for r in replies]

    run = federation(
        toy_task(), Scaffold, options={"control": "gradient"}, on_failure="skip", rounds=3
    )
    plan = run.step()
    first = run.store.load(1, 1)
    run.step(spoiled)
    third = next(msg for msg in run.strategy.plan(3) if msg.pid == 1)
    own = run.client().handle(third).extras["scaffold.c_i"]
    assert (
        third.version == 1
        and len(plan) == 4
        and all(torch.equal(t, first[f"scaffold.c_i/{name}"]) for name, t in own.items())
    )


def test_a_batch_is_what_losses_see(federation: Callable[..., Any]) -> None:
    """The extra pass covers every sample once."""
    seen: list[int] = []

    class Spy(Plugin):
        name = "spy"

        def losses(self, batch: Batch) -> Tensor:
            seen.append(len(batch.y))
            return torch.zeros(len(batch.y))

    federation(
        toy_task(1),
        Scaffold,
        plugins=lambda: [Spy()],
        options={"control": "gradient"},
        batch_size=5,
        epochs=1,
    ).step()
    assert seen == [12, 5, 5, 2]
