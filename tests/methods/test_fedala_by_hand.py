"""FedALA in numpy, from the text of the paper, on full batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from methods.by_hand import (
    DATA,
    LR,
    SIZES,
    Case,
    Weights,
    case,
    gradient,
    latents,
    local_sgd,
    mean,
    same,
    task,
)
from methods.readouts import arrays, client_state, copied

from fedhet.core.server.evaluation import evaluation_messages
from fedhet.core.task import ClientData, Task
from fedhet.methods.fedala import FedALA

__all__ = ["case"]
Federation = Callable[..., Any]
LOCAL, WEIGHTS = "fedala.w", "fedala.A"  # client state
TOP = {1: ("head.weight", "head.bias"), 2: ("body.weight", "body.bias", "head.weight", "head.bias")}


def cross_entropy(w: Weights, x: np.ndarray, y: np.ndarray) -> float:
    logits = latents(w, x) @ w["head.weight"].T + w["head.bias"]
    return float(np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]))


class MixingClient:
    """What a client keeps, and where it starts.

    Attributes:
        local: the top layers of its last local model.
        weights: its A_k.
        epochs: how many epochs each of its learnings took.
    """

    def __init__(
        self, pid: int, top: tuple[str, ...], *, eta: float, threshold: float, max_epochs: int
    ) -> None:
        self.pid = pid
        self.top = top
        self.eta = eta
        self.threshold = threshold
        self.max_epochs = max_epochs
        self.local: Weights | None = None
        self.weights: Weights | None = None
        self.epochs: list[int] = []

    def mixture(self, x: Weights, weights: Weights) -> Weights:
        assert self.local is not None
        w = self.local
        return {**x, **{name: w[name] + (x[name] - w[name]) * weights[name] for name in self.top}}

    def learned(self, x: Weights) -> Weights | None:
        """A_k after what a client does with the received x before it trains."""
        w = self.local
        if w is None or all(np.array_equal(x[name], w[name]) for name in self.top):
            return self.weights
        weights = self.weights or {name: np.ones_like(x[name]) for name in self.top}
        losses: list[float] = []
        while len(losses) < (self.max_epochs if self.weights is None else 1):
            start = self.mixture(x, weights)
            losses.append(cross_entropy(start, *DATA[self.pid]))
            g = gradient(start, *DATA[self.pid])
            weights = {
                name: np.clip(a - self.eta * g[name] * (x[name] - w[name]), 0, 1)
                for name, a in weights.items()
            }
            if len(losses) >= 10 and np.std(losses[-10:]) < self.threshold:
                break
        self.epochs.append(len(losses))
        return weights

    def start(self, x: Weights) -> Weights:
        """Where the client would start to train from x."""
        weights = self.learned(x)
        return x if weights is None else self.mixture(x, weights)

    def train(self, x: Weights) -> Weights:
        """The local model after a participation."""
        self.weights = self.learned(x)
        start = x if self.weights is None else self.mixture(x, self.weights)
        end = local_sgd(start, self.pid)
        self.local = {name: end[name].copy() for name in self.top}
        return end


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize(
    ("eta", "threshold", "max_epochs"), [(1.0, 0.1, 100), (40.0, 2e-3, 60), (40.0, 0.0, 12)]
)
def test_by_hand(
    case: Callable[..., Case], p: int, eta: float, threshold: float, max_epochs: int
) -> None:
    """Zhang et al., algorithm 1, on all samples: each client's own w_k and A_k.

    FedAvg averages what the clients end with.
    """
    settings = {"eta": eta, "threshold": threshold, "max_epochs": max_epochs}
    running = case(FedALA, options={"p": p, "s": 100, **settings})
    clients = [MixingClient(pid, TOP[p], **settings) for pid in range(len(SIZES))]
    for x, cohort, aggregated in running.rounds():
        same(aggregated, mean([clients[k].train(x) for k in cohort], [SIZES[k] for k in cohort]))
        for client in clients:
            same(arrays(client_state(running.run, client.pid, LOCAL)), client.local or {})
            same(arrays(client_state(running.run, client.pid, WEIGHTS)), client.weights or {})
    weights = [a.ravel() for client in clients for a in (client.weights or {}).values()]
    learned = np.concatenate(weights)
    assert ((learned > 0) & (learned < 1)).any()
    first_epochs = [client.epochs[0] for client in clients if client.epochs]
    if eta == 1:
        assert set(first_epochs) == {10}
    elif threshold:
        assert any(10 < epochs < max_epochs for epochs in first_epochs)
    else:
        assert set(first_epochs) == {max_epochs}
    assert any(client.epochs[1:] for client in clients)


@pytest.mark.parametrize("p", [1, 2])
def test_views(federation: Federation, p: int) -> None:
    """Global: x. Personal: where the client would start to train from x.

    It learns an A_k for this and forgets it.
    """
    plain = task()
    data = [ClientData(c.train, None, c.train) for c in plain.clients]
    tested_on_train = Task(plain.model, plain.criterion, data, None, 2)
    settings = {"eta": 40.0, "threshold": 2e-3, "max_epochs": 30}
    run = federation(
        tested_on_train,
        FedALA,
        options={"p": p, "s": 100, **settings},
        lr=LR,
        epochs=4,
        batch_size=99,
        fraction=0.6,
        rounds=3,
    )
    clients = [MixingClient(pid, TOP[p], **settings) for pid in range(len(SIZES))]
    mixed = 0
    for _ in range(3):
        x = copied(run.model)
        for msg in run.step():
            clients[msg.pid].train(x)
        x = copied(run.model)
        for msg in evaluation_messages(run.strategy):
            metrics = run.client().handle(msg).metrics
            start = clients[msg.pid].start(x)
            expected = [cross_entropy(w, *DATA[msg.pid]) for w in (x, start)]
            losses = [metrics[f"test.{view}.loss"] for view in ("global", "personal")]
            assert losses == pytest.approx(expected, rel=1e-9)
            mixed += expected[0] != expected[1]
    assert 3 < mixed < 15  # a client that has never taken part has nothing to mix
