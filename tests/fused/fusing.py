"""What the tests of engine.fused share: a task, and what is measured of runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from fedhet.core.targets import cross_entropy
from fedhet.core.task import ClientData, Samples, Task
from fedhet.engines.fused.passes import Assessment, Pass
from fedhet.engines.fused.steps import Training
from fedhet.models import MLP

Launch = Callable[..., Any]
LINES = [
    "rounds=3",
    "fraction=0.75",
    "client.epochs=2",
    "client.batch_size=5",
    "client.lr=0.1",
    "eval.every=3",
    "seed=1",
]
SIZES = (12, 31, 16, 8, 25, 20)


def mlp() -> nn.Module:
    return MLP(shape=(1, 8, 8), classes=10, hidden=[16])


@cache
def _digits() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels)


def digits(model: Callable[[], nn.Module] = mlp, sizes: Sequence[int] = SIZES, **more: Any) -> Task:
    """Handwritten digits: of each client so many for training, and six for testing."""
    x, y = _digits()
    clients, first = [], 40
    for n in sizes:
        train, test = slice(first, first + n), slice(first + n, first + n + 6)
        clients.append(ClientData((x[train], y[train]), None, (x[test], y[test])))
        first = test.stop
    given = {"criterion": cross_entropy, "test": Samples(x[:40], y[:40]), "classes": 10}
    return Task(model=model, clients=clients, **(given | more))


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The norm of the difference of weights, relative to that of the first ones."""
    first, second = (torch.cat([t.double().flatten() for t in w.values()]) for w in (a, b))
    return float((first - second).norm() / first.norm())


@contextmanager
def groups() -> Iterator[Counter[tuple[str, int]]]:
    """Count how often so many trainings ("steps") and forward passes ("passes") were one."""
    counted: Counter[tuple[str, int]] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for name, cls in (("steps", Training), ("passes", Pass), ("passes", Assessment)):

            def counting(some: Any, name: str = name, perform: Any = cls.perform) -> Any:
                counted[name, len(some)] += 1
                return perform(some)

            patch.setattr(cls, "perform", staticmethod(counting))
        yield counted
