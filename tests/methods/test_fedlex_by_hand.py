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

from fedhet.messages import LocalSettings
from fedhet.methods.fedlex import FedLEx, FedLExPlugin, G
from fedhet.methods.fedprox import FedProxPlugin

Make = Callable[..., Any]
MU, MOMENTUM, DECAY, CLIP = 0.8, 0.6, 0.05, 0.4
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
    w, buffer = x, each(np.zeros_like, x)
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
    """As it travels."""
    return np.asarray(array, np.float32).astype(float)


def guidance(deviations: list[Weights]) -> Weights:
    """Equation 4, per tensor."""
    return each(
        lambda *ds: single(sum((d - d.min()) / (d.max() - d.min()) for d in ds) / len(ds)),
        *deviations,
    )


def hand(
    federation: Make, local: dict[str, Any], rounds: int, plugins: Callable[[], list[Any]]
) -> Any:
    run = federation(
        dataclasses.replace(task(), model=ThreeClasses),
        FedLEx,
        plugins=plugins,
        rounds=rounds,
        fraction=0.4,
    )
    run.strategy.setting.local = LocalSettings(lr=LR, epochs=EPOCHS, batch_size=max(SIZES), **local)
    return run


@pytest.mark.parametrize("empty", ["previous", "all"])
@pytest.mark.parametrize("mu", [0.0, MU])
@pytest.mark.parametrize("local", MANNERS.values(), ids=MANNERS)
def test_rounds_by_hand(federation: Make, local: dict[str, float], mu: float, empty: str) -> None:
    """Algorithms 1 and 2 on FedAvg and FedProx: 2 of 5 explore, 2 of 5 train in each round."""
    rounds, e_exp = 7, 6
    plugins = [
        lambda: FedLExPlugin(c_exp=2, e_exp=e_exp, empty=empty),
        lambda: FedProxPlugin(mu=mu),
    ]
    run = hand(federation, local, rounds, lambda: [make() for make in plugins])
    x = {name: t.numpy().copy() for name, t in run.model.items()}
    explorers = [msg.pid for msg in run.step()]
    same({name: t.numpy() for name, t in run.model.items()}, x)  # exploring moves nothing
    explored = {
        pid: each(lambda a, b: single((a - b) ** 2), x, trained(x, pid, e_exp, **local))
        for pid in explorers
    }
    seen, current = set(), {}
    for number in range(rounds):
        cohort = [msg.pid for msg in run.step()]
        used = explorers if number == 0 else [pid for pid in explorers if pid in cohort]
        if used or empty == "all":
            current = guidance([explored[pid] for pid in used or explorers])
        x = mean(
            [trained(x, k, EPOCHS, mask=current, mu=mu, **local) for k in cohort],
            [SIZES[k] for k in cohort],
        )
        same({name: t.numpy() for name, t in run.model.items()}, x)
        seen.add(len(used) if number else "first")
    assert {"first", 0, 1} <= seen  # without an explorer among them, with one, and the first


@pytest.mark.parametrize("weight_decay", [0.0, DECAY])
def test_masking_the_update_is_masking_the_gradient_up_to_weight_decay(
    federation: Make, weight_decay: float
) -> None:
    """W + G (step(W) - W), step by step; momentum is linear, so only the decay is masked beside the
    gradient."""
    local = {"momentum": MOMENTUM, "weight_decay": weight_decay}
    by_gradient, by_update = (
        hand(
            federation, local, 3, lambda how=how: [FedLExPlugin(c_exp=3, e_exp=5, apply_to=how)]
        ).run()
        for how in ("gradient", "update")
    )
    apart = max(
        float((by_gradient.model[name] - by_update.model[name]).abs().max())
        for name in by_update.model
    )
    assert apart < 1e-12 if weight_decay == 0 else apart > 1e-4


@pytest.mark.parametrize("apply_to", ["gradient", "update"])
def test_adams_first_step(federation: Make, apply_to: str) -> None:
    """lr g/(|g| + 1e-8): a mask on the gradient cancels but for that constant, a mask on the update
    does not."""
    run = hand(
        federation,
        {"optimizer": "adam"},
        1,
        lambda: [FedLExPlugin(c_exp=3, e_exp=5, apply_to=apply_to)],
    )
    run.strategy.setting.local = LocalSettings(
        lr=0.1, epochs=1, batch_size=max(SIZES), optimizer="adam"
    )
    run.step()
    x = {name: t.numpy().copy() for name, t in run.model.items()}
    plan = run.step()
    mask = {name: t.double().numpy() for name, t in plan[0].extras[G].items()}
    local = []
    for msg in plan:
        g = gradient(x, *DATA[msg.pid])
        masked = each(np.multiply, g, mask) if apply_to == "gradient" else g
        step = each(lambda a: 0.1 * a / (np.abs(a) + 1e-8), masked)
        local.append(
            each(lambda a, s, m: a - (s * m if apply_to == "update" else s), x, step, mask)
        )
    same(
        {name: t.numpy() for name, t in run.model.items()},
        mean(local, [SIZES[m.pid] for m in plan]),
    )
