"""FedDyn: the rounds of its algorithm 1 by hand, FedProx's first step, and the limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from convergence.quadratic import final_weight, quadratic
from methods.by_hand import DATA, EPOCHS, LR, SIZES, Case, Weights, case, each, gradient, mean, same
from methods.readouts import arrays, client_state, step_and_replies

from fedhet.core.errors import ConfigError
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.feddyn import FedDyn
from fedhet.methods.fedprox import FedProxPlugin

__all__ = ["case"]
Federation = Callable[..., Any]
# Client i has the loss a_i/2 (w - b_i)^2; ten steps of this rate take it most of the way.
PROBLEM: dict[str, Any] = {"a": [1.0, 4.0, 2.0], "b": [1.0, -1.0, 3.0], "steps": 10, "lr": 0.05}


@pytest.mark.parametrize("alpha", [0.1, 0.9])
def test_by_hand(case: Callable[..., Case], alpha: float) -> None:
    """Acar et al., algorithm 1, with three of the five clients in each round."""
    running = case(FedDyn, options={"alpha": alpha})
    zero = each(lambda a: 0 * a, running.weights)
    g: list[Weights] = [zero] * len(SIZES)
    h = zero
    for x, cohort, merged in running.rounds():
        sent = []
        for k in cohort:
            w = x
            for _ in range(EPOCHS):
                w = each(
                    lambda w, d, own, x: w - LR * (d - own + alpha * (w - x)),
                    w,
                    gradient(w, *DATA[k]),
                    g[k],
                    x,
                )
            g[k] = each(lambda own, w, x: own - alpha * (w - x), g[k], w, x)
            sent.append(w)
        moved = each(lambda x, *sent: sum(sent) - len(sent) * x, x, *sent)
        h = each(lambda h, d: h - alpha / len(SIZES) * d, h, moved)
        same(merged, each(lambda w, h: w - h / alpha, mean(sent, [1] * len(sent)), h))
        for k in range(len(SIZES)):
            same(arrays(client_state(running.run, k, "feddyn.g")) or zero, g[k])


def test_the_first_training_is_that_of_fedprox(federation: Federation) -> None:
    """g_k is 0 then, so the gradients differ by nothing: the replies are equal to the last bit."""
    settings: dict[str, Any] = {"rounds": 2, "epochs": 3, "lr": 0.1, "local": {"momentum": 0.5}}
    dyn = federation(toy_task(norm=True), FedDyn, options={"alpha": 0.5}, **settings)
    prox = federation(
        toy_task(norm=True), FedAvg, plugins=lambda: [FedProxPlugin(mu=0.5)], **settings
    )
    for equal in (True, False):  # and in the second round g_k counts
        _, own = step_and_replies(dyn)
        _, others = step_and_replies(prox)
        for a, b in zip(own, others, strict=True):
            found = [torch.equal(t, b.weights[name]) for name, t in a.weights.items()]
            assert all(found) is equal


@pytest.mark.slow
@pytest.mark.parametrize(("alpha", "fraction"), [(2.0, 1.0), (0.5, 1.0), (2.0, 0.67)])
def test_it_reaches_the_optimum_where_fedavg_does_not(alpha: float, fraction: float) -> None:
    """The optimum of the mean loss is the mean of the b_i under the a_i.

    FedAvg stops where the clients' moves 1 - (1 - lr a_i)^K towards b_i cancel.
    """
    a, b = np.array(PROBLEM["a"]), PROBLEM["b"]
    optimum = np.average(b, weights=a)
    moves = 1 - (1 - PROBLEM["lr"] * a) ** PROBLEM["steps"]
    biased = np.average(b, weights=moves)
    assert abs(biased - optimum) > 0.1
    how: dict[str, Any] = {"rounds": 100 if fraction == 1 else 300, "fraction": fraction}
    found = final_weight(**PROBLEM, **how, method="feddyn", method_args={"alpha": alpha})
    assert found == pytest.approx(optimum, abs=1e-6)
    if fraction == 1:
        fedavg = final_weight(**PROBLEM, rounds=40, method="fedavg")
        assert fedavg == pytest.approx(biased, abs=1e-6)


@pytest.mark.slow
def test_at_the_fixed_point_each_g_is_the_gradient_there(federation: Federation) -> None:
    """They sum to 0: the first-order condition of the mean loss."""
    task = quadratic(PROBLEM["a"], PROBLEM["b"])
    how = {"lr": PROBLEM["lr"], "epochs": PROBLEM["steps"], "batch_size": 1, "rounds": 100}
    run = federation(task, FedDyn, options={"alpha": 1.0}, **how).run()
    w = float(run.model["w"])
    g = [float(client_state(run, pid, "feddyn.g")["w"]) for pid in range(3)]
    expected = [a * (w - b) for a, b in zip(PROBLEM["a"], PROBLEM["b"], strict=True)]
    assert g == pytest.approx(expected, abs=1e-6)
    assert sum(g) == pytest.approx(0, abs=1e-6)


def test_alpha_must_be_positive(federation: Federation) -> None:
    with pytest.raises(ConfigError, match=r"method\.alpha=0 "):
        federation(toy_task(), FedDyn, options={"alpha": 0})
