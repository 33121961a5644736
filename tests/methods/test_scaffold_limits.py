"""Where SCAFFOLD converges on clients with f_i(w) = a_i/2 (w - b_i)^2, with both options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from convergence.quadratic import final_weight, quadratic
from methods.plugs import Fixed

from fedhet.methods.scaffold import Scaffold

Federation = Callable[..., Any]


@pytest.mark.slow
@pytest.mark.parametrize("fraction", [pytest.param(1.0, marks=pytest.mark.matrix), 0.5])
@pytest.mark.parametrize(
    ("extra", "plugins"),
    [
        pytest.param({"client.momentum": 0.5}, [], id="momentum"),
        pytest.param(
            {},
            [],
            id="plain",
        ),
        pytest.param({}, ["fednorm"], id="fednorm"),
    ],
)
def test_option_i_reaches_the_optimum(
    fraction: float, extra: dict[str, float], plugins: list[str]
) -> None:
    """With momentum too, which option II does not allow; tests/convergence has option II."""
    w = final_weight(
        a=[1.0, 4.0],
        b=[1.0, -1.0],
        steps=5,
        lr=0.03,
        method="scaffold",
        plugins=plugins,
        fraction=fraction,
        rounds=80 if fraction == 1.0 else 150,
        method_args={"control": "gradient", **extra},
    )
    assert w == pytest.approx(-0.6, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("control", "fraction"),
    [("steps", 1.0), ("gradient", 1.0), ("steps", 0.5), ("gradient", 0.5)],
)
def test_fixed_weights_move_the_limit(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, control: str, fraction: float
) -> None:
    """Under weights v SCAFFOLD goes to the optimum of sum_i v_i f_i, as FedNorm's eq. 6 wants.

    At half participation lambda_j = R w_j is a constant of client j only where w_j does not depend
    on who else takes part. So the cohorts are two pairs, drawn at random, and w is v within a pair.
    """
    a = [1.0, 4.0, 2.0, 0.5]
    b = [1.0, -1.0, 0.0, 2.0]
    v = np.array([0.2, 0.9, 0.5, 0.3])
    share = v / v.sum()
    if fraction < 1:
        draws = np.random.default_rng(0)
        monkeypatch.setattr(
            "fedhet.core.server.strategy.sample_cohort",
            lambda *args: [[0, 1], [2, 3]][draws.integers(2)],
        )
        share = np.concatenate([v[:2] / v[:2].sum(), v[2:] / v[2:].sum()])
    run = federation(
        quadratic(a, b),
        Scaffold,
        plugins=lambda: [Fixed(v.tolist())],
        options={"control": control},
        lr=0.05,
        epochs=6,
        batch_size=1,
        rounds=60 if fraction == 1.0 else 120,
        fraction=fraction,
    ).run()
    expected = float(np.average(b, weights=share * a))
    unweighted = float(np.average(b, weights=a))
    assert float(run.model["w"]) == pytest.approx(expected, abs=1e-9)
    assert abs(expected - unweighted) > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("control", ["steps", "gradient"])
def test_random_cohorts_stay_about_that_limit(federation: Federation, control: str) -> None:
    """With any three of six clients w_j depends on the others, so x does not settle.

    Its mean over the rounds is nearer to the weighted limit than to the unweighted one.
    """
    a = np.array([1.0, 4.0, 2.0, 0.5, 3.0, 1.5])
    b = np.array([1.0, -1.0, 0.0, 2.0, 0.3, -0.5])
    v = np.array([0.5, 2.0, 1.0, 0.5, 2.0, 1.0])
    run = federation(
        quadratic(a.tolist(), b.tolist()),
        Scaffold,
        plugins=lambda: [Fixed(v.tolist())],
        options={"control": control},
        lr=0.03,
        epochs=5,
        batch_size=1,
        rounds=150,
        fraction=0.5,
    )
    path = []
    for _ in range(150):
        run.step()
        path.append(float(run.model["w"]))
    weighted = np.average(b, weights=v * a)
    unweighted = np.average(b, weights=a)
    step_ended = np.mean(path[30:])
    assert abs(step_ended - weighted) < 0.5 * abs(step_ended - unweighted)
