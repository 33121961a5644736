"""On quadratic losses the limit of every method has a closed form (quadratic.py).

K local steps of rate lr take client i from x to b_i + r_i^K (x - b_i), r_i = 1 - lr a_i. FedAvg
therefore stops at the mean of b_i under 1 - r_i^K, not at the optimum, the mean under a_i. SCAFFOLD
stops only at the optimum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from convergence.quadratic import final_weight, quadratic
from methods.by_hand import V
from methods.plugs import Fixed

from fedhet.methods.fedavg import FedAvg
from fedhet.methods.scaffold import Scaffold

Problem = dict[str, Any]

TWO: Problem = {"a": [1.0, 4.0], "b": [1.0, -1.0], "steps": 10, "lr": 0.05}
FIVE: Problem = {
    "a": [1.0, 4.0, 2.0, 0.5, 3.0],
    "b": [1.0, -1.0, 0.0, 2.0, 0.3],
    "steps": 6,
    "lr": 0.07,
}
PROBLEMS = {"two": TWO, "five": FIVE, "unequal": {**FIVE, "steps": [2, 5, 9, 7, 3]}}


def optimum(problem: Problem) -> float:
    return float(np.average(problem["b"], weights=problem["a"]))


def local_limit(problem: Problem, mu: float = 0.0) -> float:
    """Where averaging stops after local SGD on f_i + mu/2 (w - x)^2.

    Such a step contracts by 1 - lr (a + mu) towards (a b + mu x) / (a + mu), so client i moves by
    (1 - r^K) a/(a + mu) (b - x), and the moves must cancel.
    """
    a = np.array(problem["a"])
    b = np.array(problem["b"])
    steps = np.array(problem["steps"])
    moved = (1 - (1 - problem["lr"] * (a + mu)) ** steps) * a / (a + mu)
    return float(np.average(b, weights=moved))


def test_the_two_client_numbers() -> None:
    assert local_limit(TWO) == pytest.approx(-0.379757, abs=1e-6)
    assert optimum(TWO) == pytest.approx(-0.6, abs=1e-12)


@pytest.mark.parametrize("name", PROBLEMS)
def test_fedavg_reaches_its_biased_limit(name: str) -> None:
    problem = PROBLEMS[name]
    limit = local_limit(problem)
    assert final_weight(**problem, method="fedavg", rounds=30) == pytest.approx(limit, abs=1e-9)
    # Otherwise FedAvg and SCAFFOLD could not be distinguished.
    assert abs(limit - optimum(problem)) > 0.01


@pytest.mark.parametrize(
    ("mu", "how"),
    [
        pytest.param(
            0.5, {"method": "fedprox", "method_args": {"mu": 0.5}}, marks=pytest.mark.matrix
        ),
        (
            2.0,
            {"method": "fedavg", "plugins": ["fedprox"], "method_args": {"plugin.fedprox.mu": 2.0}},
        ),
    ],
    ids=["method", "plugin"],
)
def test_fedprox_reaches_its_own_limit(mu: float, how: dict[str, Any]) -> None:
    limit = local_limit(FIVE, mu)
    assert final_weight(**FIVE, rounds=40, **how) == pytest.approx(limit, abs=1e-9)


@pytest.mark.parametrize(
    "plugins",
    [[], pytest.param(["fednorm"], marks=pytest.mark.slow)],
    ids=["alone", "fednorm"],
)
@pytest.mark.parametrize(
    ("name", "fraction"),
    [
        ("two", 1.0),
        ("unequal", 0.6),
        *(pytest.param(name, 0.5, marks=pytest.mark.matrix) for name in ("two", "five")),
    ],
)
def test_scaffold_reaches_the_optimum(name: str, fraction: float, plugins: list[str]) -> None:
    """Constant features make all latents equal, so FedNorm must not change SCAFFOLD."""
    problem = PROBLEMS[name]
    how = {"method": "scaffold", "plugins": plugins, "fraction": fraction, "w0": 0.7}
    w = final_weight(**problem, **how, rounds={1.0: 35, 0.6: 60, 0.5: 200}[fraction])
    assert w == pytest.approx(optimum(problem), abs=1e-9)


def test_fedavg_does_not_settle_at_half_participation() -> None:
    """So FedAvg would fail the test above."""
    w = final_weight(**TWO, method="fedavg", rounds=20, fraction=0.5)
    assert abs(w - optimum(TWO)) > 0.1


def test_scaffold_with_a_server_rate_below_one_reaches_the_optimum() -> None:
    w = final_weight(**TWO, method="scaffold", rounds=38, method_args={"lr_g": 0.7})
    assert w == pytest.approx(optimum(TWO), abs=1e-9)


@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
@pytest.mark.matrix
def test_fednorm_with_constant_features_follows_its_host(method: str) -> None:
    rounds = 7  # before the limit, where every aggregation weight still counts
    alone = final_weight(**FIVE, method=method, rounds=rounds)
    with_fednorm = final_weight(**FIVE, method=method, rounds=rounds, plugins=["fednorm"])
    assert with_fednorm == pytest.approx(alone, abs=1e-12)


def test_server_momentum_has_the_same_limit() -> None:
    """The pseudo-gradient vanishes where FedAvg stops."""
    w = final_weight(**TWO, method="fedavgm", rounds=70, method_args={"beta": 0.5, "lr": 0.5})
    assert w == pytest.approx(local_limit(TWO), abs=1e-9)


WEIGHTED_OPTIMUM = float(np.average(FIVE["b"], weights=np.array(V) * FIVE["a"]))
WEIGHTED_LIMIT = float(
    np.average(FIVE["b"], weights=V * (1 - (1 - FIVE["lr"] * np.array(FIVE["a"])) ** FIVE["steps"]))
)


@pytest.mark.parametrize(
    ("cls", "options", "expected"),
    [
        (Scaffold, {}, WEIGHTED_OPTIMUM),
        pytest.param(
            Scaffold, {"control_weights": "uniform"}, optimum(FIVE), marks=pytest.mark.matrix
        ),
        pytest.param(FedAvg, {}, WEIGHTED_LIMIT, marks=pytest.mark.matrix),
    ],
    ids=["scaffold", "scaffold-uniform-controls", "fedavg"],
)
def test_the_fixed_point_of_equation_6(
    federation: Callable[..., Any], cls: type, options: dict[str, Any], expected: float
) -> None:
    """With weights v, SCAFFOLD minimises sum_i v_i f_i, as FedNorm's equation 6 requires.

    Its controls are averaged under v too. With a plain mean of the controls the weights cancel, and
    x goes where plain SCAFFOLD goes.
    """
    run = federation(
        quadratic(FIVE["a"], FIVE["b"]),
        cls,
        plugins=lambda: [Fixed(V)],
        options=options,
        lr=FIVE["lr"],
        epochs=FIVE["steps"],
        batch_size=1,
        rounds=45,
    ).run()
    assert float(run.model["w"]) == pytest.approx(expected, abs=1e-9)
