"""FedGen's local training in numpy, from the text of the paper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from methods.by_hand import (
    DATA,
    EPOCHS,
    LR,
    SIZES,
    Case,
    Weights,
    case,
    each,
    gradient,
    latents,
    mean,
    same,
    task,
)
from methods.readouts import arrays, copied
from methods.small_generator import SMALL, source

from fedhet.core.task import ClientData, Samples
from fedhet.methods.fedgen import FedGen, NoiseSource

__all__ = ["case"]


def generated(g: Weights, noise: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Linear without bias, batch norm with its running statistics, ReLU, linear."""
    inputs = np.concatenate([noise, np.eye(2)[y]], 1)
    h = inputs @ g["layers.0.weight"].T
    h = (h - g["layers.1.running_mean"]) / np.sqrt(g["layers.1.running_var"] + 1e-5)
    h = h * g["layers.1.weight"] + g["layers.1.bias"]
    return np.maximum(h, 0) @ g["layers.3.weight"].T + g["layers.3.bias"]


def head(w: Weights, z: np.ndarray) -> np.ndarray:
    """The probabilities that the head gives to features z."""
    logits = z @ w["head.weight"].T + w["head.bias"]
    p = np.exp(logits - logits.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


def backward(w: Weights, x: np.ndarray, error: np.ndarray) -> Weights:
    """The gradient of a loss whose derivative by the logits is `error`."""
    h = latents(w, x)
    back = (error @ w["head.weight"]) * (h > 0)
    return {
        "body.weight": back.T @ x,
        "body.bias": back.sum(0),
        "head.weight": error.T @ h,
        "head.bias": error.sum(0),
    }


def trained(x: Weights, pid: int, g: Weights, draws: NoiseSource | None, lam: float) -> Weights:
    """The local model after a participation; without draws there is no generator yet."""
    inputs, y = DATA[pid]
    w = x
    n = len(y)
    for _ in range(EPOCHS):
        total = gradient(w, inputs, y)
        if draws is not None:
            labels = draws.labels(n).numpy()
            z = generated(g, draws.noise(n).numpy(), labels)
            error = lam * (head(w, z) - np.eye(2)[labels]) / n
            total["head.weight"] = total["head.weight"] + error.T @ z
            total["head.bias"] = total["head.bias"] + error.sum(0)
        w = each(lambda a, b: a - LR * b, w, total)
    return w


def test_round_by_hand(case: Callable[..., Case]) -> None:
    """Zhu et al., algorithm 1: from round 2 on, the local loss has one term more.

    It is lam decay^(t - 1) E CE(h(G(eps, y')), y'). The models are averaged.
    """
    running = case(FedGen, options={**SMALL, "lam": 0.8, "decay": 0.5, "noise": "uniform"})
    strategy = running.run.strategy
    g: Weights = {}
    counts: dict[int, np.ndarray] = {}
    for step, (x, cohort, aggregated) in enumerate(running.rounds(), start=1):
        expected = []
        for k in cohort:
            draws = None
            if step > 1:
                law = torch.from_numpy(sum(counts.values())).float()  # type: ignore[arg-type]
                draws = source(
                    running.run, strategy.weights["generator"], step, k, law=law, noise="uniform"
                )
            expected.append(trained(x, k, g, draws, 0.8 * 0.5 ** (step - 1)))
        same(aggregated, mean(expected, [SIZES[k] for k in cohort]))
        counts |= {k: np.bincount(DATA[k][1], minlength=2) for k in cohort}
        g = copied(strategy.weights["generator"])


def test_the_divergence_term_by_hand(federation: Callable[..., Any]) -> None:
    """kl KL(h(G(eps, y)) || h(f(x))) for the sample's own label.

    Its derivative by the logits of f(x) is p - target.
    """
    inputs = DATA[0][0][:1]
    y = DATA[0][1][:1]
    sample = ClientData(Samples(torch.from_numpy(inputs), torch.from_numpy(y)))
    one_sample = replace(task(), clients=[sample], sizes=[1])
    options = {**SMALL, "lam": 0.0, "kl": 0.7}
    run = federation(one_sample, FedGen, options=options, lr=LR, epochs=1, rounds=2)
    run.step()
    x = copied(run.model)
    g = copied(run.strategy.weights["generator"])
    run.step()
    draws = source(run, run.strategy.weights["generator"], 2, 0, law=torch.ones(2))
    p = head(x, latents(x, inputs))
    target = head(x, generated(g, draws.noise(1).numpy(), y))
    error = p - np.eye(2)[y] + 0.7 * (p - target)
    expected = each(lambda a, b: a - LR * b, x, backward(x, inputs, error))
    same(arrays(run.model), expected)
