"""FedNova."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from convergence.quadratic import LocalSteps, final_weight, quadratic
from maths.cases import named_case
from methods.by_hand import DATA, LR, SIZES, Case, V, Weights, each, gradient, mean, same, task
from methods.plugs import Fixed

from fedhet.core.errors import ConfigError, RunFailed
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.methods.fednova import FedNova
from fedhet.methods.fedprox import FedProxPlugin

Federation = Callable[..., Any]
TAUS = [2, 5, 1, 3, 4]
TWO: dict[str, Any] = {"a": [1.0, 4.0], "b": [1.0, -1.0], "lr": 0.05}
FIVE: dict[str, Any] = {"a": [1.0, 4.0, 2.0, 0.5, 3.0], "b": [1.0, -1.0, 0.0, 2.0, 0.3], "lr": 0.07}
STEPS_OF_FIVE = [2, 5, 9, 7, 3]


def local(x: Weights, pid: int, rho: float, mu: float, lr: float) -> tuple[Weights, list[float]]:
    """The weights after local training, and the vector a_i.

    Its entries say how much of lr times each visited gradient there is in x - w.
    """
    w = x
    d = each(np.zeros_like, x)
    for _ in range(TAUS[pid]):
        g = each(lambda a, b, c: a + mu * (b - c), gradient(w, *DATA[pid]), w, x)
        d = each(lambda a, b: rho * a + b, d, g)
        w = each(lambda a, b: a - lr * b, w, d)
    tau = TAUS[pid]
    if mu:
        return w, [(1 - lr * mu) ** (tau - 1 - j) for j in range(tau)]
    return w, [sum(rho**i for i in range(tau - j)) for j in range(tau)]


@pytest.mark.parametrize("tau_eff", ["normalised", "mean_steps"])
@pytest.mark.parametrize("weights", [None, V], ids=["n_k", "fixed"])
@pytest.mark.parametrize(
    ("rho", "mu"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.8)], ids=["plain", "momentum", "proximal"]
)
def test_by_hand(
    case: Callable[..., Case], rho: float, mu: float, weights: Any, tau_eff: str
) -> None:
    """Wang et al., eq. 8: x - tau_eff sum_i p_i eta d_i with d_i = G_i a_i / |a_i|_1.

    So eta d_i = (x - w_i) / |a_i|_1. The rate decays, and with it a_i under the proximal term.
    """
    plugins = [
        lambda: LocalSteps(TAUS),
        *([lambda: FedProxPlugin(mu=mu)] if mu else []),
        *([lambda: Fixed(V)] if weights else []),
    ]
    running = case(
        FedNova,
        plugins=lambda: [make() for make in plugins],
        local={"momentum": rho},
        options={"tau_eff": tau_eff},
        lr_decay=0.7,
    )
    for step, (x, cohort, new) in enumerate(running.rounds()):
        p = [(weights or SIZES)[i] for i in cohort]
        ends, a = zip(*(local(x, i, rho, mu, LR * 0.7**step) for i in cohort), strict=True)
        norms = [sum(vector) for vector in a]
        d = [
            each(lambda b, c, norm=norm: (b - c) / norm, x, w)
            for w, norm in zip(ends, norms, strict=True)
        ]
        progress = norms if tau_eff == "normalised" else [TAUS[i] for i in cohort]
        tau = float(np.average(progress, weights=p))
        same(new, each(lambda b, c, t=tau: b - t * c, x, mean(d, p)))
        assert running.run.current.recorded["fednova"]["tau_eff"] == pytest.approx(tau)


@pytest.mark.parametrize("local", [{}, {"momentum": 0.9}], ids=["plain", "momentum"])
@pytest.mark.parametrize(
    "plugins", [list, lambda: [FedNormPlugin(temperature=0.05)]], ids=["alone", "fednorm"]
)
def test_equal_steps_are_fedavg_bit_for_bit(
    federation: Federation, plugins: Any, local: dict[str, float]
) -> None:
    """All |a_i|_1 are equal where clients have 12 samples, or one batch each."""
    for toy, how in (
        (toy_task(equal=True, norm=True), {"batch_size": 5, "epochs": 2}),
        (toy_task(5), {"batch_size": 99, "epochs": 3}),
    ):
        fednova, fedavg = (
            federation(toy, cls, plugins=plugins, local=local, rounds=3, fraction=0.75, **how).run()
            for cls in (FedNova, FedAvg)
        )
        assert fednova.sha256 == fedavg.sha256


def test_unequal_steps_are_not_fedavg(federation: Federation) -> None:
    fednova, fedavg = (
        federation(toy_task(norm=True), cls, rounds=2).run() for cls in (FedNova, FedAvg)
    )
    assert fednova.sha256 != fedavg.sha256


def converged(problem: dict[str, Any], steps: Any, **more: Any) -> float:
    """w after a run of FedNova on the quadratic clients."""
    return final_weight(**problem, steps=steps, method="fednova", **more)


@pytest.mark.slow
def test_the_proximal_normaliser_needs_mu() -> None:
    """mean_steps and normalised agree for plain SGD, and differ under the proximal term."""
    for mu, equal in ((0.0, True), (0.9, False)):
        limits = [
            converged(
                FIVE,
                STEPS_OF_FIVE,
                plugins=["fedprox"],
                rounds=5,
                method_args={"plugin.fedprox.mu": mu, "tau_eff": tau_eff},
            )
            for tau_eff in ("normalised", "mean_steps")
        ]
        assert (limits[0] == limits[1]) is equal


def test_a_tiny_mu_is_plain_sgd(federation: Federation) -> None:
    """lr mu is 1e-12 and 1e-17: the clients neither gain nor lose weight."""
    for mu in [1e-11, 1e-16]:
        with named_case(mu):
            tiny, plain = (
                federation(
                    task(),
                    FedNova,
                    plugins=lambda mu=mu: [LocalSteps(TAUS), FedProxPlugin(mu=mu)],
                    rounds=2,
                ).run()
                for mu in (mu, 0.0)
            )
            same(
                {name: t.numpy() for name, t in tiny.model.items()},
                {name: t.numpy() for name, t in plain.model.items()},
            )


def limit(a: Any, b: Any, steps: Any, lr: float, mu: float = 0.0) -> float:
    """Client i moves by (1 - r^tau) a/(a + mu) (b - x), r = 1 - lr (a + mu).

    At the limit these moves cancel under the weights 1/|a_i|_1.
    """
    a, b, steps = np.array(a), np.array(b), np.array(steps)
    norm = (1 - (1 - lr * mu) ** steps) / (lr * mu) if mu else steps
    return float(np.average(b, weights=(1 - (1 - lr * (a + mu)) ** steps) * a / (a + mu) / norm))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "steps", "plugins"),
    [
        pytest.param(FIVE, STEPS_OF_FIVE, [], id="five"),
        pytest.param(FIVE, STEPS_OF_FIVE, ["fednorm"], id="fednorm"),
        pytest.param(TWO, [3, 30], [], id="two"),
        pytest.param(TWO, 10, [], id="equal"),
    ],
)
def test_it_reaches_its_own_limit(problem: dict[str, Any], steps: Any, plugins: list[str]) -> None:
    w = converged(problem, steps, plugins=plugins, rounds=40, fraction=1.0, seed=0)
    each_steps = steps if isinstance(steps, list) else [steps] * len(problem["a"])
    expected = limit(**problem, steps=each_steps)
    assert w == pytest.approx(expected, abs=1e-9)
    if steps == 10:
        assert expected == pytest.approx(-0.379757, abs=1e-6)  # FedAvg's


@pytest.mark.slow
def test_the_limit_with_a_proximal_term() -> None:
    mu = {"plugin.fedprox.mu": 0.9}
    w = converged(FIVE, STEPS_OF_FIVE, plugins=["fedprox"], rounds=60, method_args=mu)
    assert w == pytest.approx(limit(**FIVE, steps=STEPS_OF_FIVE, mu=0.9), abs=1e-9)


@pytest.mark.slow
def test_the_limit_under_fixed_weights(federation: Federation) -> None:
    """The weights v are in both sums.

    The limit is the mean of b under v (1 - r^tau) / tau, and tau_eff the mean of the steps under v.
    """
    run = federation(
        quadratic(FIVE["a"], FIVE["b"]),
        FedNova,
        plugins=lambda: [LocalSteps(STEPS_OF_FIVE), Fixed(V)],
        lr=0.07,
        batch_size=1,
        rounds=60,
    ).run()
    a, steps = np.array(FIVE["a"]), np.array(STEPS_OF_FIVE)
    weights = np.array(V) * (1 - (1 - 0.07 * a) ** steps) / steps
    expected = float(np.average(FIVE["b"], weights=weights))
    assert float(run.model["w"]) == pytest.approx(expected, abs=1e-9)
    assert run.current.recorded["fednova"]["tau_eff"] == pytest.approx(
        float(np.average(steps, weights=V))
    )


def claiming(steps: Any, pid: int = 0) -> Callable[[list[Any], list[Any]], list[Any]]:
    """Alters the replies: client `pid` claims so many steps."""
    extras = {"fednova.steps": steps}
    return lambda plan, replies: [replace(r, extras=extras) if r.pid == pid else r for r in replies]


def test_a_client_without_a_step_is_left_out(federation: Federation) -> None:
    """Its weights do not count, whatever they are; without any step the run ends."""
    idle = federation(toy_task(), FedNova, plugins=lambda: [LocalSteps([0, 1, 2, 3])])
    without = federation(
        toy_task(), FedNova, plugins=lambda: [LocalSteps([1, 1, 2, 3])], on_failure="skip"
    )
    idle.step()
    without.step(claiming(-1))
    assert idle.sha256 == without.sha256
    with pytest.raises((ValueError, RunFailed), match=r"weight .*0.*positive"):
        federation(toy_task(), FedNova, plugins=lambda: [LocalSteps([0] * 4)]).step()


def test_bad_steps_name_client_and_extra(federation: Federation) -> None:
    for steps, message in [
        (-1, ">= 0"),
        (1.5, "whole number"),
        (float("nan"), "finite"),
        ("3", "finite"),
    ]:
        with (
            named_case(steps, message),
            pytest.raises(RunFailed, match=rf"client 2 .*'fednova\.steps'.*{message}"),
        ):
            federation(toy_task(), FedNova).step(claiming(steps, 2))


def test_a_whole_number_may_come_as_a_float(federation: Federation) -> None:
    how = {"local": {"momentum": 0.9}, "batch_size": 99, "epochs": 3}
    honest, other = (federation(toy_task(), FedNova, **how) for _ in range(2))
    honest.step()
    other.step(claiming(3.0))
    assert honest.sha256 == other.sha256


def test_what_has_no_normaliser_is_refused(federation: Federation) -> None:
    cases = [
        ({"local": {"optimizer": "adam"}}, "client.optimizer=adam.*SGD"),
        (
            {"local": {"momentum": 0.9}, "plugins": lambda: [FedProxPlugin(mu=0.1)]},
            r"client.momentum=0.9.*plugin.fedprox.mu=0.1.*no agreed",
        ),
        ({"plugins": lambda: [FedProxPlugin(mu=30.0)]}, r"lr mu=3.*\[0, 2\)"),
        ({"options": {"tau_eff": "sum"}}, "method.tau_eff=sum"),
    ]
    for how, message in cases:
        with named_case(how, message), pytest.raises(ConfigError, match=message):
            federation(toy_task(), FedNova, **how)


def test_momentum_with_mu_zero_is_allowed(federation: Federation) -> None:
    how = {"local": {"momentum": 0.9}, "rounds": 2}
    with_plugin = federation(toy_task(), FedNova, plugins=lambda: [FedProxPlugin(mu=0)], **how)
    assert with_plugin.run().sha256 == federation(toy_task(), FedNova, **how).run().sha256
