"""SGDM: momentum federated learning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from convergence.quadratic import final_weight
from maths.cases import named_case
from methods.by_hand import DATA, EPOCHS, LR, SIZES, Case, V, Weights, each, gradient, mean, same
from methods.plugs import Fixed
from torch import nn
from torch.nn import functional

from fedhet.core import streams
from fedhet.core.client.optimizers import SGD
from fedhet.core.errors import ConfigError, RunFailed
from fedhet.core.messages import LocalSettings
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.methods.sgdm import SGDM

Federation = Callable[..., Any]
GAMMA = 0.8
DECAY = 0.05
STATES = pytest.mark.parametrize("state", ["averaged", "reset"])


def local(x: Weights, d: Weights, pid: int) -> tuple[Weights, Weights]:
    """Liu et al., eq. 4 and 5: d(t) = gamma d(t-1) + grad F(w(t-1)), w(t) = w(t-1) - eta d(t)."""
    w = x
    for _ in range(EPOCHS):
        d = each(lambda a, g, b: GAMMA * a + g + DECAY * b, d, gradient(w, *DATA[pid]), w)
        w = each(lambda a, b: a - LR * b, w, d)
    return w, d


@pytest.mark.parametrize("weights", [None, V], ids=["n_k", "fixed"])
@STATES
def test_by_hand(case: Callable[..., Case], state: str, weights: Any) -> None:
    """Both averages, of w and of d, have the same weights.

    3 of 5 clients take part, so that a client's d comes from others too.
    """
    running = case(
        SGDM,
        plugins=lambda: [Fixed(V)] if weights else [],
        local={"weight_decay": DECAY},
        options={"gamma": GAMMA, "momentum_state": state},
    )
    zero = d = each(np.zeros_like, running.weights)
    for x, cohort, new in running.rounds():
        p = [(weights or SIZES)[i] for i in cohort]
        ends, momenta = zip(*(local(x, d, i) for i in cohort), strict=True)
        same(new, mean(ends, p))
        d = mean(momenta, p) if state == "averaged" else zero


@pytest.mark.parametrize("gamma", [0.0, 0.8])
def test_the_recursion(gamma: float) -> None:
    """It starts from a given d, also with gamma = 0, where d is the last gradient."""
    draws = torch.Generator().manual_seed(0)
    w, d, *grads = torch.randn(7, 5, generator=draws, dtype=torch.float64)
    parameter = nn.Parameter(w.clone())
    buffer = d.clone()
    optimizer = SGD([parameter], LocalSettings(lr=0.1, momentum=gamma), [buffer])
    for g in grads:
        with torch.no_grad():
            optimizer.step([g.clone()])
        d = gamma * d + g
        w = w - 0.1 * d
    torch.testing.assert_close(buffer, d, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(parameter.detach(), w, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    "plugins", [list, lambda: [FedNormPlugin(temperature=0.05)]], ids=["alone", "fednorm"]
)
@STATES
def test_without_momentum_it_is_fedavg_bit_for_bit(
    federation: Federation, state: str, plugins: Any
) -> None:
    how = {
        "plugins": plugins,
        "rounds": 4,
        "fraction": 0.75,
        "epochs": 2,
        "local": {"weight_decay": 0.01, "clip": 0.5},
    }
    options = {"gamma": 0.0, "momentum_state": state}
    sgdm = federation(toy_task(norm=True), SGDM, options=options, **how).run()
    assert sgdm.sha256 == federation(toy_task(norm=True), FedAvg, **how).run().sha256


def test_reset_is_fedavg_with_client_momentum(federation: Federation) -> None:
    how = {"rounds": 3, "fraction": 0.75, "epochs": 2}
    reset, averaged = (
        federation(toy_task(), SGDM, options={"momentum_state": state}, **how).run()
        for state in ("reset", "averaged")
    )
    fedavg = federation(toy_task(), FedAvg, local={"momentum": 0.9}, **how).run()
    assert reset.sha256 == fedavg.sha256 != averaged.sha256


@STATES
def test_one_client_is_centralised_heavy_ball(launch: Callable[..., Any], state: str) -> None:
    """One torch.optim.SGD for all rounds, over the same batches, bit for bit; not with reset."""
    rounds, epochs, size, lr, decay = 4, 2, 5, 0.1, 0.01
    task = toy_task(1)
    run = launch(
        "method=sgdm",
        f"method.momentum_state={state}",
        f"rounds={rounds}",
        f"client.epochs={epochs}",
        f"client.batch_size={size}",
        f"client.lr={lr}",
        f"client.weight_decay={decay}",
        "eval.clients=false",
        task=task,
    )
    with torch.random.fork_rng():
        torch.manual_seed(streams.integer(0, "init"))
        model = task.model()
    x = task.clients[0].train.x
    y = task.clients[0].train.y
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=decay)
    for step in range(1, rounds + 1):
        draws = streams.torch_generator(0, "batches", "train", step, 0)
        for _ in range(epochs):
            for batch in torch.randperm(len(y), generator=draws).split(size):
                optimizer.zero_grad()
                functional.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
    equal = all(
        torch.equal(run.weights[name], expected) for name, expected in model.state_dict().items()
    )
    assert equal is (state == "averaged")


def limit(a: list[float], b: list[float], steps: int, lr: float, gamma: float) -> float:
    """The fixed point of the mean of the clients' linear maps of (w - b_i, d)."""
    step = [np.array([[1 - lr * q, -lr * gamma], [q, gamma]]) for q in a]
    maps = [np.linalg.matrix_power(matrix, steps) for matrix in step]
    shifts = [np.array([c, 0.0]) - m @ np.array([c, 0.0]) for m, c in zip(maps, b, strict=True)]
    fixed_point = np.linalg.solve(np.eye(2) - np.mean(maps, axis=0), np.mean(shifts, axis=0))
    return float(fixed_point[0])


@pytest.mark.slow
@pytest.mark.parametrize("plugins", [[], ["fednorm"]], ids=["alone", "fednorm"])
def test_it_reaches_its_limit_on_the_quadratic(plugins: list[str]) -> None:
    problem = {
        "a": [1.0, 4.0, 2.0, 0.5, 3.0],
        "b": [1.0, -1.0, 0.0, 2.0, 0.3],
        "steps": 6,
        "lr": 0.03,
    }
    w = final_weight(
        **problem, method="sgdm", plugins=plugins, rounds=50, method_args={"gamma": 0.5}
    )
    assert w == pytest.approx(limit(**problem, gamma=0.5), abs=1e-9)


def test_the_momenta_that_a_server_receives_are_checked(federation: Federation) -> None:
    def broken(plan: list[Any], replies: list[Any]) -> list[Any]:
        d = {name: t.clone() for name, t in replies[1].extras["sgdm.d"].items()}
        d["head.bias"][0] = float("nan")
        return [replies[0], replace(replies[1], extras={"sgdm.d": d}), *replies[2:]]

    with pytest.raises(RunFailed, match=r"client 2 .*'sgdm\.d'.*'head\.bias'.*NaN"):
        federation(toy_task(), SGDM).step(broken)
    run = federation(toy_task(), SGDM, on_failure="skip", rounds=2)
    run.step(broken)  # both averages go on with the other clients
    assert [failure.pid for failure in run.current.failures] == [2]
    sent = run.strategy.plan(2).messages[0].extras["sgdm.d"]
    assert all(torch.isfinite(t).all() for t in sent.values())


def test_a_client_does_not_write_into_what_the_server_sends(federation: Federation) -> None:
    run = federation(toy_task(), SGDM, rounds=2)
    run.step()
    msg = run.strategy.plan(2).messages[0]
    before = {name: t.clone() for name, t in msg.extras["sgdm.d"].items()}
    assert any(t.any() for t in before.values())
    run.client().handle(msg)
    assert all(torch.equal(t, before[name]) for name, t in msg.extras["sgdm.d"].items())


def test_bytes(launch: Callable[..., Any]) -> None:
    """d is as large as the parameters, both ways; with reset it does not travel."""
    tree = 4 * 92  # 23 parameters of 4 bytes, for 4 clients
    for state, expected in (
        ("averaged", {"model": tree, "sgdm.d": tree}),
        ("reset", {"model": tree}),
    ):
        run = launch(
            "method=sgdm",
            f"method.momentum_state={state}",
            "rounds=1",
            "eval.clients=false",
            task=toy_task(),
        )
        assert run.summary["bytes"] == {"up": expected, "down": expected}


def test_bad_settings_are_named(federation: Federation) -> None:
    cases = [
        ({"local": {"momentum": 0.5}}, r"client\.momentum=0\.5.*method\.gamma"),
        ({"local": {"optimizer": "adam"}}, r"client\.optimizer=adam"),
        ({"options": {"gamma": 1.0}}, r"method\.gamma=1\.0"),
        ({"options": {"gamma": -0.1}}, r"method\.gamma=-0\.1"),
        ({"options": {"momentum_state": "kept"}}, r"method\.momentum_state=kept"),
    ]
    for how, message in cases:
        with named_case(how, message), pytest.raises(ConfigError, match=message):
            federation(toy_task(), SGDM, **how)
