"""Rounds of federated learning in numpy, from the papers' text, with gradients by hand.

The network is 3-4-2 with ReLU and cross entropy, in float64. Every batch is a client's whole data
set, so that the order of the samples does not matter. No expected value is computed by fedhet; only
the cohorts are taken from its messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedhet.core.task import ClientData, Task

SIZES = (5, 8, 3, 6, 7)
LR = 0.3
EPOCHS = 4
ROUNDS = 3
V = (0.1, 0.4, 0.2, 0.2, 0.1)  # weights of the clients other than by size, for `Fixed`
Weights = dict[str, np.ndarray]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4, dtype=torch.float64)
        self.head = nn.Linear(4, 2, dtype=torch.float64)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x).relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def criterion(output: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(output, y, reduction="none")


RNG = np.random.default_rng(7)
DATA = [(RNG.normal(size=(n, 3)) + 0.5 * RNG.normal(size=3), RNG.integers(0, 2, n)) for n in SIZES]


def task() -> Task:
    clients = [ClientData((torch.from_numpy(x), torch.from_numpy(y))) for x, y in DATA]  # type: ignore[arg-type]
    return Task(Net, criterion, clients, None, 2)


def latents(w: Weights, x: np.ndarray) -> np.ndarray:
    """What the head receives."""
    return np.maximum(x @ w["body.weight"].T + w["body.bias"], 0)


def gradient(w: Weights, x: np.ndarray, y: np.ndarray) -> Weights:
    """The gradient of the mean cross entropy."""
    h = latents(w, x)
    logits = h @ w["head.weight"].T + w["head.bias"]
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    p /= len(y)
    back = (p @ w["head.weight"]) * (h > 0)
    return {
        "body.weight": back.T @ x,
        "body.bias": back.sum(0),
        "head.weight": p.T @ h,
        "head.bias": p.sum(0),
    }


def each(f: Callable[..., np.ndarray], *trees: Weights) -> Weights:
    """`f` of the tensors of one name, for every name."""
    return {name: f(*(tree[name] for tree in trees)) for name in trees[0]}


def mean(trees: Sequence[Weights], p: Sequence[float]) -> Weights:
    """The mean of the trees under the weights `p`, which need not sum to 1."""
    return {
        name: sum(q * tree[name] for q, tree in zip(p, trees, strict=True)) / sum(p)
        for name in trees[0]
    }


def local_sgd(
    x: Weights, pid: int, change: Callable[[Weights, Weights], Weights] = lambda g, w: g
) -> Weights:
    """The weights after EPOCHS steps from x along `change` of (gradient, weights)."""
    w = x
    for _ in range(EPOCHS):
        w = each(lambda a, g: a - LR * g, w, change(gradient(w, *DATA[pid]), w))
    return w


def same(actual: Weights, expected: Weights) -> None:
    """Assert that the weights agree to the rounding of float64."""
    assert list(actual) == list(expected)
    for name in expected:
        np.testing.assert_allclose(
            actual[name], expected[name], rtol=1e-10, atol=1e-12, err_msg=name
        )


@dataclass
class Case:
    """A run of fedhet whose rounds a test computes again by hand."""

    run: Any

    @property
    def weights(self) -> Weights:
        return {name: t.numpy() for name, t in self.run.model.items()}

    def rounds(self) -> Iterator[tuple[Weights, list[int], Weights]]:
        """(x before the round, its cohort, x after the round in fedhet)."""
        for _ in range(ROUNDS):
            before = {name: array.copy() for name, array in self.weights.items()}
            plan = self.run.step()
            yield before, [msg.pid for msg in plan], self.weights


@pytest.fixture
def case(federation: Callable[..., Any]) -> Callable[..., Case]:
    """Builds a `Case` in which three of the five clients take part in each round."""

    def make(cls: type, **how: Any) -> Case:
        run = federation(
            task(),
            cls,
            lr=LR,
            epochs=EPOCHS,
            batch_size=max(SIZES),
            rounds=ROUNDS,
            fraction=0.6,
            **how,
        )
        return Case(run)

    return make


def corrected(own: Weights, c: Weights) -> Callable[[Weights, Weights], Weights]:
    """SCAFFOLD's local gradient, g - c_i + c, for `local_sgd`."""
    return lambda g, w: each(lambda a, b, d: a - b + d, g, own, c)
