"""Clients with f_i(w) = a_i/2 (w - b_i)^2: the limit of every method has a closed form.

K local steps of rate lr take client i from x to b_i + r_i^K (x - b_i), r_i = 1 - lr a_i. FedAvg
therefore stops at the mean of b_i under 1 - r_i^K, not at the optimum, which is the mean under a_i.
SCAFFOLD stops only at the optimum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from methods.by_hand import V
from methods.plugs import Fixed
from vectors.adapter import quadratic, replay

from fedhet.methods.fedavg import FedAvg
from fedhet.methods.scaffold import Scaffold

TWO: dict[str, Any] = {"a": [1.0, 4.0], "b": [1.0, -1.0], "steps": 10, "lr": 0.05}
FIVE: dict[str, Any] = {
    "a": [1.0, 4.0, 2.0, 0.5, 3.0],
    "b": [1.0, -1.0, 0.0, 2.0, 0.3],
    "steps": 6,
    "lr": 0.07,
}
PROBLEMS = {"two": TWO, "five": FIVE, "unequal": {**FIVE, "steps": [2, 5, 9, 7, 3]}}


def run(problem: dict[str, Any], method: str, rounds: int, **how: Any) -> float:
    params = {
        **problem,
        "method": method,
        "plugins": [],
        "rounds": rounds,
        "fraction": 1.0,
        "seed": 0,
        **how,
    }
    return float(replay("convergence", "quadratic", params, {})["w"])


def optimum(problem: dict[str, Any]) -> float:
    return float(np.average(problem["b"], weights=problem["a"]))


def local_limit(problem: dict[str, Any], mu: float = 0.0) -> float:
    """Where averaging after local SGD on f_i + mu/2 (w - x)^2 stops.

    A local step contracts by r = 1 - lr (a + mu) towards (a b + mu x) / (a + mu), so client i moves
    by (1 - r^K) a/(a + mu) (b - x), and the moves must cancel.
    """
    a, b, steps = np.array(problem["a"]), np.array(problem["b"]), np.array(problem["steps"])
    moved = (1 - (1 - problem["lr"] * (a + mu)) ** steps) * a / (a + mu)
    return float(np.average(b, weights=moved))


def test_the_two_client_numbers() -> None:
    assert local_limit(TWO) == pytest.approx(-0.379757, abs=1e-6)
    assert optimum(TWO) == pytest.approx(-0.6, abs=1e-12)


@pytest.mark.parametrize("name", PROBLEMS)
def test_fedavg_reaches_its_biased_limit(name: str) -> None:
    assert run(PROBLEMS[name], "fedavg", 40) == pytest.approx(local_limit(PROBLEMS[name]), abs=1e-9)
    # Otherwise FedAvg and SCAFFOLD could not be distinguished.
    assert abs(local_limit(PROBLEMS[name]) - optimum(PROBLEMS[name])) > 0.01


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
    assert run(FIVE, rounds=60, **how) == pytest.approx(local_limit(FIVE, mu), abs=1e-9)


@pytest.mark.parametrize("plugins", [[], ["fednorm"]], ids=["alone", "fednorm"])
@pytest.mark.parametrize(
    ("name", "fraction"),
    [
        ("two", 1.0),
        ("unequal", 0.6),
        *(pytest.param(name, 0.5, marks=pytest.mark.matrix) for name in ("two", "five")),
    ],
)
def test_scaffold_reaches_the_optimum(name: str, fraction: float, plugins: list[str]) -> None:
    """Constant features make all latents equal, so FedNorm must leave SCAFFOLD as it is."""
    w = run(
        PROBLEMS[name],
        "scaffold",
        60 if fraction == 1.0 else 200,
        fraction=fraction,
        plugins=plugins,
        w0=0.7,
    )
    assert w == pytest.approx(optimum(PROBLEMS[name]), abs=1e-9)


def test_fedavg_does_not_settle_at_half_participation() -> None:
    """So the test above is one that FedAvg fails."""
    assert abs(run(TWO, "fedavg", 50, fraction=0.5) - optimum(TWO)) > 0.1


def test_scaffold_with_a_server_rate_below_one_reaches_the_optimum() -> None:
    assert run(TWO, "scaffold", 80, method_args={"lr_g": 0.7}) == pytest.approx(
        optimum(TWO), abs=1e-9
    )


@pytest.mark.parametrize("method", ["fedavg", "fedprox"])
@pytest.mark.matrix
def test_fednorm_with_constant_features_follows_its_host(method: str) -> None:
    rounds = 7  # in transit, where every weight still counts
    assert run(FIVE, method, rounds, plugins=["fednorm"]) == pytest.approx(
        run(FIVE, method, rounds), abs=1e-12
    )


def test_server_momentum_has_the_same_limit() -> None:
    """The pseudo-gradient vanishes where FedAvg stops."""
    w = run(TWO, "fedavgm", 150, method_args={"beta": 0.5, "lr": 0.5})
    assert w == pytest.approx(local_limit(TWO), abs=1e-9)


@pytest.mark.parametrize(
    ("cls", "options", "expected"),
    [
        (Scaffold, {}, float(np.average(FIVE["b"], weights=np.array(V) * FIVE["a"]))),
        pytest.param(
            Scaffold, {"control_weights": "uniform"}, optimum(FIVE), marks=pytest.mark.matrix
        ),
        pytest.param(
            FedAvg,
            {},
            float(np.average(FIVE["b"], weights=V * (1 - (1 - 0.07 * np.array(FIVE["a"])) ** 6))),
            marks=pytest.mark.matrix,
        ),
    ],
    ids=["scaffold", "scaffold-uniform-controls", "fedavg"],
)
def test_the_fixed_point_of_equation_6(
    federation: Callable[..., Any], cls: type, options: dict[str, Any], expected: float
) -> None:
    """With weights v, SCAFFOLD minimises sum_i v_i f_i, as FedNorm's equation 6 wants.

    Its controls are averaged under v too. With their plain mean the weights cancel, and x goes to
    the limit without weights.
    """
    run = federation(
        quadratic(FIVE["a"], FIVE["b"]),
        cls,
        plugins=lambda: [Fixed(V)],
        options=options,
        lr=0.07,
        epochs=6,
        batch_size=1,
        rounds=150,
    ).run()
    assert float(run.model["w"]) == pytest.approx(expected, abs=1e-9)
