"""FedGMM: its phases and a few rounds in NumPy, from the paper's text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from methods.fedgmm_task import (
    CLASSES,
    COUNTS_BY_CLIENT,
    DATA,
    GLOBAL_MAX,
    LR,
    PSI,
    REG,
    SHAPE,
    kept,
    pixels,
    task,
    task_of,
)

from fedhet.methods.fedgmm.mixtures import MIXTURES

Launch = Callable[..., Any]


def test_what_is_shared(fedgmm: Launch) -> None:
    """Section 4.1 with one component, whose EM has a closed form.

    Mixtures are concatenated in the order of ids, with the weights n_ic / sum n_ic.
    """
    run = fedgmm()
    assert [msg.pid for msg in run.step()] == [2, 1, 0]
    shared = run.step()[0].extras[MIXTURES]
    behind = {0: [0, 1], 1: [1, 2], 2: [2]}  # class -> the clients with at least two samples
    rows = [(c, pid) for c, pids in behind.items() for pid in pids]
    totals = {c: sum(len(pixels(pid, c)) for pid in pids) for c, pids in behind.items()}
    assert shared["label"].tolist() == [c for c, _ in rows]
    pi = [len(pixels(pid, c)) / totals[c] for c, pid in rows]
    mu = [pixels(pid, c).mean(0) for c, pid in rows]
    var = [pixels(pid, c).var(0) + REG for c, pid in rows]
    np.testing.assert_allclose(shared["pi"], pi, rtol=1e-6)
    np.testing.assert_allclose(shared["mu"], mu, rtol=1e-6)
    np.testing.assert_allclose(shared["var"], var, rtol=1e-6)


@pytest.mark.parametrize("most", [5, 1])
def test_five_components_have_the_pooled_moments(fedgmm: Launch, most: int) -> None:
    """As they travel, in float32."""
    rng = np.random.default_rng(0)
    data = [(rng.uniform(0, 1, (n, *SHAPE)), np.zeros(n, dtype=int)) for n in (30, 9, 14)]
    options = {"components": 5, "max_components": None if most == 5 else most}
    run = fedgmm(task_of(data), options=options)
    run.step()
    shared = run.step()[0].extras[MIXTURES]
    pi, mu, var = (shared[name].double().numpy() for name in ("pi", "mu", "var"))
    assert len(pi) == (14 if most == 5 else 1)
    pooled = np.concatenate([x.reshape(-1, 4) for x, _ in data])
    np.testing.assert_allclose(pi @ mu, pooled.mean(0), rtol=1e-6)
    np.testing.assert_allclose(pi @ (var + mu**2) - (pi @ mu) ** 2, pooled.var(0) + REG, rtol=1e-5)


@pytest.mark.parametrize(
    ("target", "goals"),
    [("client_max", [3, 5, 6]), ("global_max", [6, 6, 6]), (2, [2, 2, 2]), (9, [9, 9, 9])],
)
def test_every_class_is_filled_up(fedgmm: Launch, target: str | int, goals: list[int]) -> None:
    """To the client's largest class, to that of any client, or to a number.

    Class 3 has no mixture, and no real sample is discarded.
    """
    run = fedgmm(options={"target": target})
    run.step()
    plan = run.step()
    assert (GLOBAL_MAX in plan[0].extras) == (target == "global_max")
    for pid, goal in enumerate(goals):
        expected = np.maximum(goal - COUNTS_BY_CLIENT[pid], 0) * [1, 1, 1, 0]
        assert kept(run, pid)["y"].bincount(minlength=CLASSES).tolist() == expected.tolist()
    generated = sum(len(kept(run, pid)["y"]) for pid in run.strategy.run.versions)
    assert run.current.recorded["fedgmm"]["generated"] == generated


def test_generated_pixels_follow_the_shared_mixture(fedgmm: Launch) -> None:
    """Drawn, clipped to [0, 1] and kept as uint8, against NumPy's own draws of class 1."""
    n = 20_000
    run = fedgmm(options={"target": n})
    run.step()
    shared = run.step()[0].extras[MIXTURES]
    rows = shared["label"] == 1
    pi, mu, var = (shared[name][rows].double().numpy() for name in ("pi", "mu", "var"))
    rng = np.random.default_rng(0)
    component = rng.choice(len(pi), n, p=pi / pi.sum())
    expected = (mu + rng.standard_normal((n, len(pi), 4)) * var**0.5)[np.arange(n), component]
    expected = expected.clip(0, 1)
    generated = kept(run, 0)
    actual = generated["x"][generated["y"] == 1].reshape(-1, 4).numpy() / 255
    assert len(actual) == n
    np.testing.assert_allclose(actual.mean(0), expected.mean(0), rtol=0, atol=0.01)
    np.testing.assert_allclose(actual.std(0), expected.std(0), rtol=0, atol=0.01)


def test_min_class_samples(fedgmm: Launch) -> None:
    """With 1 the single sample of client 0 is shared too, and is its own mean.

    With 5, classes 0 and 2 have no mixture.
    """
    run = fedgmm(options={"min_class_samples": 1})
    run.step()
    shared = run.step()[0].extras[MIXTURES]
    assert shared["label"].tolist() == [0, 0, 1, 1, 2, 2]
    np.testing.assert_allclose(shared["mu"][4], pixels(0, 2)[0], rtol=1e-6)
    np.testing.assert_allclose(shared["var"][4], REG, rtol=1e-6)
    run = fedgmm(options={"min_class_samples": 5})
    run.step()
    assert run.step()[0].extras[MIXTURES]["label"].tolist() == [1, 1]
    assert kept(run, 0)["y"].tolist() == [1, 1, 1]


def test_no_client_has_enough_samples_of_any_class(fedgmm: Launch) -> None:
    run = fedgmm(options={"min_class_samples": 50, "psi": 0.0}).run()
    assert [tuple(kept(run, pid)["x"].shape) for pid in range(3)] == [(0, *SHAPE)] * 3
    assert run.sha256 == fedgmm(options={"target": 0, "psi": 0.0}).run().sha256


def test_one_client_balances_itself(fedgmm: Launch) -> None:
    run = fedgmm(task_of([DATA[1]])).run()
    assert kept(run, 0)["y"].tolist() == [0, 0, 0]


def gradient(
    w: np.ndarray, b: np.ndarray, x: np.ndarray, y: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The gradient of mean_b weights_b CE_b in w and b."""
    logits = x @ w.T + b
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    p *= weights[:, None] / len(y)
    return p.T @ x, p.sum(0)


@pytest.mark.parametrize(
    "options",
    [{}, {"agg_count": "augmented"}, {"gen_weight": 0.25}, {"target": 9, "agg_count": "augmented"}],
    ids=str,
)
def test_rounds_on_real_and_generated_samples(fedgmm: Launch, options: dict[str, Any]) -> None:
    """Algorithm 1, lines 4 to 9: p_i = N_i / sum N and eta <- (1 - psi) eta.

    Generated samples are normalised like real ones.
    """
    epochs = 2
    run = fedgmm(task(), options=options, epochs=epochs)
    run.step()
    run.step()
    training_sets = []
    for pid, (x, y) in enumerate(DATA):
        generated = kept(run, pid)
        all_x = np.concatenate([x.astype(np.float64), generated["x"].numpy() / 255])
        all_y = np.concatenate([y, generated["y"].numpy()])
        weights = np.repeat([1.0, options.get("gen_weight", 1.0)], [len(y), len(all_y) - len(y)])
        training_sets.append(((all_x.reshape(-1, 4) - 0.4) / 0.3, all_y, weights))
    if options.get("agg_count"):
        sizes = [len(all_y) for _, all_y, _ in training_sets]
    else:
        sizes = [len(y) for _, y in DATA]
    w = run.model["head.weight"].numpy().copy()
    b = run.model["head.bias"].numpy().copy()
    for t in range(3):
        plan = run.step()
        lr = LR * (1 - PSI) ** t
        assert {msg.local.lr for msg in plan} == {lr}
        ends = []
        for own in training_sets:
            w_i = w
            b_i = b
            for _ in range(epochs):
                w_grad, b_grad = gradient(w_i, b_i, *own)
                w_i = w_i - lr * w_grad
                b_i = b_i - lr * b_grad
            ends.append((w_i, b_i))
        w = sum(n * w_i for n, (w_i, _) in zip(sizes, ends, strict=True)) / sum(sizes)
        b = sum(n * b_i for n, (_, b_i) in zip(sizes, ends, strict=True)) / sum(sizes)
        np.testing.assert_allclose(run.model["head.weight"], w, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(run.model["head.bias"], b, rtol=1e-9, atol=1e-12)
