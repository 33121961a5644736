"""FedLEx: rounds by hand from the paper's text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from methods.by_hand import DATA, EPOCHS, LR, SIZES, Net, Weights, each, gradient, mean, same, task
from torch import nn

from fedhet.core.kernel import Plugin
from fedhet.methods.fedlex import FedLEx, FedLExPlugin
from fedhet.methods.fedprox import FedProxPlugin

Make = Callable[..., Any]

G = "fedlex.G"

MU = 0.8
MOMENTUM = 0.6
DECAY = 0.05
CLIP = 0.4
MANNERS = {"plain": {}, "all": {"momentum": MOMENTUM, "weight_decay": DECAY, "clip": CLIP}}


class ThreeClasses(Net):
    """With two, the bias of the head moves by (-a, a): a D that is constant but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3, dtype=torch.float64)


def trained(
    x: Weights,
    pid: int,
    epochs: int,
    *,
    mask: Weights | None = None,
    mu: float = 0.0,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    clip: float | None = None,
) -> Weights:
    """Local SGD with full batches: (g + mu (w - x)) G, then clipping, weight decay, momentum."""
    w = x
    buffer = each(np.zeros_like, x)
    for _ in range(epochs):
        g = each(lambda a, b, c: a + mu * (b - c), gradient(w, *DATA[pid]), w, x)
        g = each(np.multiply, g, mask or each(np.ones_like, g))
        if clip is not None:
            shrink = min(1.0, clip / (np.sqrt(sum((t**2).sum() for t in g.values())) + 1e-6))
            g = each(lambda a, s=shrink: a * s, g)
        buffer = each(lambda a, b, c: momentum * a + b + weight_decay * c, buffer, g, w)
        w = each(lambda a, b: a - LR * b, w, buffer)
    return w


def single(array: Any) -> np.ndarray:
    """The values as they travel, in float32."""
    return np.asarray(array, np.float32).astype(float)


def guidance(deviations: list[Weights]) -> Weights:
    """Equation 4, per tensor."""
    return each(
        lambda *ds: single(sum((d - d.min()) / (d.max() - d.min()) for d in ds) / len(ds)),
        *deviations,
    )


def federation_of_five(
    federation: Make,
    plugins: Callable[[], list[Plugin]],
    *,
    rounds: int,
    local: dict[str, Any],
    lr: float = LR,
    epochs: int = EPOCHS,
) -> Any:
    """Full batches; 2 of 5 clients take part in each round. `local` are further settings."""
    return federation(
        dataclasses.replace(task(), model=ThreeClasses),
        FedLEx,
        plugins=plugins,
        rounds=rounds,
        fraction=0.4,
        lr=lr,
        epochs=epochs,
        batch_size=max(SIZES),
        local=local,
    )


def model_of(run: Any) -> Weights:
    return {name: t.numpy().copy() for name, t in run.model.items()}


@pytest.mark.parametrize("empty", ["previous", "all"])
@pytest.mark.parametrize("mu", [0.0, MU])
@pytest.mark.parametrize("local", MANNERS.values(), ids=MANNERS)
def test_rounds_by_hand(federation: Make, local: dict[str, float], mu: float, empty: str) -> None:
    """Algorithms 1 and 2 on FedAvg and FedProx: 2 of 5 explore, 2 of 5 train in each round."""
    rounds = 7
    e_exp = 6

    def plugins() -> list[Plugin]:
        return [FedLExPlugin(c_exp=2, e_exp=e_exp, empty=empty), FedProxPlugin(mu=mu)]

    run = federation_of_five(federation, plugins, rounds=rounds, local=local)
    x = model_of(run)
    explorers = [msg.pid for msg in run.step()]
    same(model_of(run), x)  # exploring moves nothing
    deviations = {
        pid: each(lambda a, b: single((a - b) ** 2), x, trained(x, pid, e_exp, **local))
        for pid in explorers
    }
    seen = set()
    mask: Weights = {}
    for number in range(rounds):
        cohort = [msg.pid for msg in run.step()]
        used = explorers if number == 0 else [pid for pid in explorers if pid in cohort]
        if used or empty == "all":
            mask = guidance([deviations[pid] for pid in used or explorers])
        ends = [trained(x, pid, EPOCHS, mask=mask, mu=mu, **local) for pid in cohort]
        x = mean(ends, [SIZES[pid] for pid in cohort])
        same(model_of(run), x)
        seen.add(len(used) if number else "first")
    assert {"first", 0, 1} <= seen  # the first round, one without an explorer, one with one


@pytest.mark.parametrize("weight_decay", [0.0, DECAY])
def test_masking_the_update_is_masking_the_gradient_up_to_weight_decay(
    federation: Make, weight_decay: float
) -> None:
    """W + G (step(W) - W) in each step.

    Momentum is linear, so the decay is all that is masked beside the gradient.
    """
    local = {"momentum": MOMENTUM, "weight_decay": weight_decay}

    def end(apply_to: str) -> Weights:
        def plugins() -> list[Plugin]:
            return [FedLExPlugin(c_exp=3, e_exp=5, apply_to=apply_to)]

        return model_of(federation_of_five(federation, plugins, rounds=3, local=local).run())

    by_gradient = end("gradient")
    by_update = end("update")
    apart = max(float(np.abs(by_gradient[name] - by_update[name]).max()) for name in by_update)
    if weight_decay == 0:
        assert apart < 1e-12
    else:
        assert apart > 1e-4


@pytest.mark.parametrize("apply_to", ["gradient", "update"])
def test_adams_first_step(federation: Make, apply_to: str) -> None:
    """Adam's first step is lr g / (|g| + 1e-8).

    But for that constant it cancels a mask on the gradient. A mask on the update stays.
    """
    lr = 0.1

    def plugins() -> list[Plugin]:
        return [FedLExPlugin(c_exp=3, e_exp=5, apply_to=apply_to)]

    run = federation_of_five(
        federation, plugins, rounds=1, local={"optimizer": "adam"}, lr=lr, epochs=1
    )
    run.step()
    x = model_of(run)
    plan = run.step()
    mask = {name: t.double().numpy() for name, t in plan[0].extras[G].items()}
    ends = []
    for msg in plan:
        g = gradient(x, *DATA[msg.pid])
        if apply_to == "gradient":
            g = each(np.multiply, g, mask)
        step = each(lambda a: lr * a / (np.abs(a) + 1e-8), g)
        if apply_to == "update":
            step = each(np.multiply, step, mask)
        ends.append(each(np.subtract, x, step))
    same(model_of(run), mean(ends, [SIZES[msg.pid] for msg in plan]))
