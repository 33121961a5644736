"""The network 3-4-3 with ReLU, and five clients without batches, for rounds by hand: its gradients
are numpy's, in float64.

Nobody but client 0 and 1 has every class, so that what a client lacks matters.
"""

from __future__ import annotations

import numpy as np
import torch
from methods.test_by_hand import SIZES, Weights, criterion
from torch import Tensor, nn

from fedhet.task import ClientData, Task

CLASSES = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = (
            nn.Linear(3, 4, dtype=torch.float64),
            nn.Linear(4, CLASSES, dtype=torch.float64),
        )

    def features(self, x: Tensor) -> Tensor:
        return self.body(x).relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


RNG = np.random.default_rng(3)
LABELS = [
    np.arange(n) % CLASSES if pid < 2 else np.arange(n) % 2 + pid % 2 for pid, n in enumerate(SIZES)
]
DATA = [(RNG.normal(size=(len(y), 3)) + y[:, None], y) for y in LABELS]


def task() -> Task:
    """Whose clients also test on their training data."""
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
    """The gradient of the cross entropies of logits `a`."""
    return softmax(a) - np.eye(a.shape[1])[y]


def backward(
    w: Weights, x: np.ndarray, d_logits: np.ndarray, d_features: np.ndarray | float = 0.0
) -> Weights:
    """The gradient of the mean loss from those of the samples' losses."""
    h = features(w, x)
    d_logits = d_logits / len(x)
    back = (d_logits @ w["head.weight"] + d_features / len(x)) * (h > 0)
    return {
        "body.weight": back.T @ x,
        "body.bias": back.sum(0),
        "head.weight": d_logits.T @ h,
        "head.bias": d_logits.sum(0),
    }
