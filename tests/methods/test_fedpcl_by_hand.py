"""FedPCL's rounds in numpy, from the text of the paper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from methods.by_hand import DATA, EPOCHS, LR, SIZES, Weights, latents, same, task
from methods.readouts import arrays, client_state, copied

from fedhet.core.client.client import UNSHARED
from fedhet.core.server.evaluation import evaluation_messages
from fedhet.core.task import ClientData
from fedhet.methods.fedpcl import FedPCL

TAU = 0.5
CLIP = 0.4


def length(a: np.ndarray) -> np.ndarray:
    """The rows' lengths, with 1 instead of 0: a ReLU may leave no feature."""
    norms = np.linalg.norm(a, axis=-1, keepdims=True)
    return np.where(norms == 0, 1, norms)


def unit(a: np.ndarray) -> np.ndarray:
    return a / length(a)


def by_class(w: Weights, pid: int) -> np.ndarray:
    """The client's prototypes; NaN for a class that it does not have."""
    x, y = DATA[pid]
    z = unit(latents(w, x))
    return np.stack([z[y == c].mean(0) if c in y else np.full(4, np.nan) for c in (0, 1)])


def stepped(w: Weights, pid: int, mean: np.ndarray, sets: list[np.ndarray]) -> Weights:
    """One step on the two contrasts, through the normalisation and the ReLU."""
    x, y = DATA[pid]
    f = latents(w, x)
    z = unit(f)
    dz = np.zeros_like(z)
    for rows, share in [(mean, 1.0), *((rows, 1 / len(sets)) for rows in sets)]:
        p = np.exp(z @ rows.T / TAU)
        p = p / p.sum(1, keepdims=True) - np.eye(2)[y]
        dz += share * p @ rows / TAU / len(y)
    df = (dz - z * (dz * z).sum(1, keepdims=True)) / length(f) * (f > 0)
    g = {"body.weight": df.T @ x, "body.bias": df.sum(0)}
    norm = np.sqrt(sum((a**2).sum() for a in g.values()))
    g = {name: a * min(1.0, CLIP / (norm + 1e-6)) for name, a in g.items()}
    return {name: t - LR * g[name] if name in g else t for name, t in w.items()}


def cosine_accuracy(w: Weights, pid: int, rows: np.ndarray) -> float:
    x, y = DATA[pid]
    cosines = np.nan_to_num(unit(latents(w, x)) @ unit(rows).T, nan=-9)
    return float(np.mean(cosines.argmax(1) == y))


def test_rounds_by_hand(federation: Callable[..., Any]) -> None:
    """Tan et al., algorithm 1: clients send prototypes, and receive their means.

    Collect; then local steps on both contrasts and new prototypes. Models stay with their clients.
    """
    assert {len(np.unique(y)) for _, y in DATA} == {1, 2}
    clients = [ClientData(c.train, None, c.train) for c in task().clients]
    run = federation(
        replace(task(), clients=clients),
        FedPCL,
        options={"tau": TAU, "clip": CLIP},
        lr=LR,
        epochs=EPOCHS,
        batch_size=max(SIZES),
        rounds=3,
        fraction=0.6,
    )
    initial = copied(run.model)
    models = [initial] * 5
    cohort = list(range(5))
    assert [msg.pid for msg in run.step()] == sorted(cohort, key=lambda k: (-SIZES[k], k))
    kept = {k: by_class(initial, k) for k in cohort}
    for _ in range(3):
        mean = np.nanmean([kept[k] for k in cohort], 0)
        sets = [np.where(np.isnan(kept[k]), mean, kept[k]) for k in cohort]
        same({"mean": run.strategy.weights["prototypes"]["mean"].numpy()}, {"mean": mean})
        cohort = [msg.pid for msg in run.step()]
        for k in cohort:
            for _ in range(EPOCHS):
                models[k] = stepped(models[k], k, mean, sets)
            kept[k] = by_class(models[k], k)
            body = {name: models[k][name] for name in ("body.weight", "body.bias")}
            state = arrays(client_state(run, k, UNSHARED))
            same({name: state[name] for name in body}, body)
        for msg in evaluation_messages(run.strategy):
            metrics = run.client().handle(msg).metrics
            expected = cosine_accuracy(models[msg.pid], msg.pid, kept[msg.pid])
            assert metrics["test.personal.accuracy"] == pytest.approx(expected)
    assert all(np.array_equal(t.numpy(), initial[name]) for name, t in run.model.items())
