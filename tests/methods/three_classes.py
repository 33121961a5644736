"""The network 3-4-3 with ReLU, and five clients, for rounds by hand in float64.

Only clients 0 and 1 have every class, so that it matters which classes a client lacks.
"""

from __future__ import annotations

import numpy as np
import torch
from methods.by_hand import SIZES, Weights, criterion
from torch import Tensor, nn

from fedhet.core.task import ClientData, Task

CLASSES = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4, dtype=torch.float64)
        self.head = nn.Linear(4, CLASSES, dtype=torch.float64)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x).relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def labels(pid: int, n: int) -> np.ndarray:
    """All three classes for clients 0 and 1; 0 and 1, or 1 and 2, for the others."""
    if pid < 2:
        return np.arange(n) % CLASSES
    return np.arange(n) % 2 + pid % 2


RNG = np.random.default_rng(3)
LABELS = [labels(pid, n) for pid, n in enumerate(SIZES)]
DATA = [(RNG.normal(size=(len(y), 3)) + y[:, None], y) for y in LABELS]


def task() -> Task:
    """A task whose clients are also tested on their training data."""
    clients = []
    for x, y in DATA:
        own = torch.from_numpy(x), torch.from_numpy(y)
        clients.append(ClientData(own, None, own))  # type: ignore[arg-type]
    return Task(Net, criterion, clients, None, CLASSES)


def features(w: Weights, x: np.ndarray) -> np.ndarray:
    return np.maximum(x @ w["body.weight"].T + w["body.bias"], 0)


def logits(w: Weights, x: np.ndarray) -> np.ndarray:
    return features(w, x) @ w["head.weight"].T + w["head.bias"]


def softmax(a: np.ndarray) -> np.ndarray:
    e = np.exp(a - a.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def error(a: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The gradient of the samples' cross entropies with respect to the logits `a`."""
    return softmax(a) - np.eye(a.shape[1])[y]


def backward(
    w: Weights, x: np.ndarray, d_logits: np.ndarray, d_features: np.ndarray | float = 0.0
) -> Weights:
    """The gradient of the mean loss, from those of the samples' losses by logits and features."""
    h = features(w, x)
    d_logits = d_logits / len(x)
    back = (d_logits @ w["head.weight"] + d_features / len(x)) * (h > 0)
    return {
        "body.weight": back.T @ x,
        "body.bias": back.sum(0),
        "head.weight": d_logits.T @ h,
        "head.bias": d_logits.sum(0),
    }
