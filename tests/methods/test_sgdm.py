"""SGDM: momentum federated learning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from methods.plugs import Fixed
from methods.test_by_hand import (
    DATA,
    EPOCHS,
    LR,
    SIZES,
    Case,
    Weights,
    case,
    each,
    gradient,
    mean,
    same,
)
from torch import nn
from torch.nn import functional
from vectors.adapter import replay

from fedhet import streams
from fedhet.data.toy import toy_task
from fedhet.errors import ConfigError, RunFailed
from fedhet.messages import LocalSettings
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.methods.sgdm import SGDM
from fedhet.optimizers import SGD

__all__ = ["case"]
V = (0.1, 0.4, 0.2, 0.2, 0.1)
GAMMA, DECAY = 0.8, 0.05


def local(x: Weights, d: Weights, pid: int) -> tuple[Weights, Weights]:
    """Liu et al., eq. 4 and 5: d(t) = gamma d(t-1) + grad F(w(t-1)), w(t) = w(t-1) - eta d(t)."""
    w = x
    for _ in range(EPOCHS):
        d = each(lambda a, g, b: GAMMA * a + g + DECAY * b, d, gradient(w, *DATA[pid]), w)
        w = each(lambda a, b: a - LR * b, w, d)
    return w, d


@pytest.mark.parametrize("weights", [None, V], ids=["n_k", "fixed"])
@pytest.mark.parametrize("state", ["averaged", "reset"])
def test_by_hand(case: Callable[..., Case], state: str, weights: Any) -> None:
    """Both averages, of w and of d, under the same weights; 3 of 5 clients, so that d comes from
    others too."""
    running = case(
        SGDM,
        plugins=lambda: [Fixed(V)] if weights else [],
        local={"weight_decay": DECAY},
        options={"gamma": GAMMA, "momentum_state": state},
    )
    zero = d = each(np.zeros_like, running.weights)
    for x, cohort, found in running.rounds():
        p = [(weights or SIZES)[i] for i in cohort]
        ends, momenta = zip(*(local(x, d, i) for i in cohort), strict=True)
        same(found, mean(ends, p))
        d = mean(momenta, p) if state == "averaged" else zero


@pytest.mark.parametrize("gamma", [0.0, 0.8])
def test_the_recursion(gamma: float) -> None:
    """From a given d, also at gamma = 0, where d is the last gradient."""
    draws = torch.Generator().manual_seed(0)
    w, d, *grads = torch.randn(7, 5, generator=draws, dtype=torch.float64)
    found, buffer = nn.Parameter(w.clone()), d.clone()
    optimizer = SGD([found], LocalSettings(lr=0.1, momentum=gamma), [buffer])
    for g in grads:
        with torch.no_grad():
            optimizer.step([g.clone()])
        d = gamma * d + g
        w = w - 0.1 * d
    torch.testing.assert_close(buffer, d, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(found.detach(), w, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    "plugins", [list, lambda: [FedNormPlugin(temperature=0.05)]], ids=["alone", "fednorm"]
)
@pytest.mark.parametrize("state", ["averaged", "reset"])
def test_without_momentum_it_is_fedavg_bit_for_bit(
    federation: Callable[..., Any], state: str, plugins: Any
) -> None:
    how = {
        "plugins": plugins,
        "rounds": 4,
        "fraction": 0.75,
        "epochs": 2,
        "local": {"weight_decay": 0.01, "clip": 0.5},
    }
    sgdm = federation(
        toy_task(norm=True), SGDM, options={"gamma": 0.0, "momentum_state": state}, **how
    ).run()
    assert sgdm.sha256 == federation(toy_task(norm=True), FedAvg, **how).run().sha256


def test_reset_is_fedavg_with_client_momentum(federation: Callable[..., Any]) -> None:
    how = {"rounds": 3, "fraction": 0.75, "epochs": 2}
    reset, averaged = (
        federation(toy_task(), SGDM, options={"momentum_state": state}, **how).run()
        for state in ("reset", "averaged")
    )
    fedavg = federation(toy_task(), FedAvg, local={"momentum": 0.9}, **how).run()
    assert reset.sha256 == fedavg.sha256 != averaged.sha256


@pytest.mark.parametrize("state", ["averaged", "reset"])
def test_one_client_is_centralised_heavy_ball(launch: Callable[..., Any], state: str) -> None:
    """One torch.optim.SGD for all rounds, over the same batches, bit for bit; under reset it is not
    that."""
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
    x, y = task.clients[0].train.x, task.clients[0].train.y
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=decay)
    for step in range(1, rounds + 1):
        draws = torch.Generator().manual_seed(streams.integer(0, "batches", "train", step, 0))
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
    """The fixed point of the mean of the clients' linear maps of (w - b_i, d), from their
    matrices."""
    moves = [
        np.linalg.matrix_power(np.array([[1 - lr * q, -lr * gamma], [q, gamma]]), steps) for q in a
    ]
    shift = [np.array([c, 0.0]) - m @ np.array([c, 0.0]) for m, c in zip(moves, b, strict=True)]
    return float(np.linalg.solve(np.eye(2) - np.mean(moves, axis=0), np.mean(shift, axis=0))[0])


@pytest.mark.parametrize("plugins", [[], ["fednorm"]], ids=["alone", "fednorm"])
def test_it_reaches_its_limit_on_the_quadratic(plugins: list[str]) -> None:
    problem = {
        "a": [1.0, 4.0, 2.0, 0.5, 3.0],
        "b": [1.0, -1.0, 0.0, 2.0, 0.3],
        "steps": 6,
        "lr": 0.03,
    }
    params = {
        **problem,
        "method": "sgdm",
        "plugins": plugins,
        "rounds": 50,
        "method_args": {"gamma": 0.5},
    }
    assert replay("convergence", "quadratic", params, {})["w"] == pytest.approx(
        limit(**problem, gamma=0.5), abs=1e-9
    )


def test_what_a_server_is_sent_is_checked(federation: Callable[..., Any]) -> None:
    def broken(plan: list[Any], replies: list[Any]) -> list[Any]:
        d = {name: t.clone() for name, t in replies[1].extras["sgdm.d"].items()}
        d["head.bias"][0] = float("nan")
        return [replies[0], replace(replies[1], extras={"sgdm.d": d}), *replies[2:]]

    with pytest.raises(RunFailed, match=r"client 2 .*'sgdm\.d'.*'head\.bias'.*NaN"):
        federation(toy_task(), SGDM).step(broken)
    run = federation(toy_task(), SGDM, on_failure="skip", rounds=2)
    run.step(broken)  # the others go on, in both averages
    assert [f.pid for f in run.strategy.current.failures] == [2]
    assert all(torch.isfinite(t).all() for t in run.strategy.plan(2)[0].extras["sgdm.d"].values())


def test_a_client_does_not_write_into_what_the_server_sends(federation: Callable[..., Any]) -> None:
    run = federation(toy_task(), SGDM, rounds=2)
    run.step()
    plan = run.strategy.plan(2)
    before = {name: t.clone() for name, t in plan[0].extras["sgdm.d"].items()}
    run.client().handle(plan[0])
    assert all(
        torch.equal(t, before[name]) for name, t in plan[0].extras["sgdm.d"].items()
    ) and any(t.any() for t in before.values())


def test_bytes(launch: Callable[..., Any]) -> None:
    """d is as large as the parameters, both ways; nothing of it under reset."""
    for state in ("averaged", "reset"):
        sent = launch(
            "method=sgdm",
            f"method.momentum_state={state}",
            "rounds=1",
            "eval.clients=false",
            task=toy_task(),
        ).summary["bytes"]
        expected = {
            "model": 4 * 92,
            **({"sgdm.d": 4 * 92} if state == "averaged" else {}),
        }  # 23 parameters of 4 bytes, 4 clients
        assert sent == {"up": expected, "down": expected}


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"local": {"momentum": 0.5}}, r"client\.momentum=0\.5.*method\.gamma"),
        ({"local": {"optimizer": "adam"}}, r"client\.optimizer=adam"),
        ({"options": {"gamma": 1.0}}, r"method\.gamma=1\.0"),
        ({"options": {"gamma": -0.1}}, r"method\.gamma=-0\.1"),
        ({"options": {"momentum_state": "kept"}}, r"method\.momentum_state=kept"),
    ],
)
def test_bad_settings_are_named(
    federation: Callable[..., Any], how: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        federation(toy_task(), SGDM, **how)
