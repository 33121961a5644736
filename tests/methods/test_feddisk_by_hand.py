"""FedDisk: its phases by hand in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from methods.feddisk_task import Make, criterion, kept, plugins
from torch import Tensor, nn

from fedhet.core.task import Task
from fedhet.data.toy import toy_task
from fedhet.methods.fedavg import FedAvg
from fedhet.methods.feddisk import FedDisk, densities
from fedhet.methods.scaffold import Scaffold


def made_step(w: dict[str, np.ndarray], x: np.ndarray, lr: float) -> dict[str, np.ndarray]:
    """One step of gradient descent on the mean of sum_d BCE.

    The masks are those of the definition, and the gradients are worked out by hand.
    """
    hidden, dim = w["W1"].shape
    m = [1 + k * (dim - 1) // hidden for k in range(hidden)]
    m1 = np.array([[float(m[k] >= d) for d in range(1, dim + 1)] for k in range(hidden)])
    m2 = np.array([[float(d > m[k]) for k in range(hidden)] for d in range(1, dim + 1)])
    h = np.maximum(x @ (w["W1"] * m1).T + w["b1"], 0)
    out = 1 / (1 + np.exp(-(h @ (w["W2"] * m2).T + w["b2"])))
    error = (out - x) / len(x)
    back = error @ (w["W2"] * m2) * (h > 0)
    grads = {"W1": back.T @ x * m1, "b1": back.sum(0), "W2": error.T @ h * m2, "b2": error.sum(0)}
    return {name: w[name] - lr * grads[name] for name in w}


@pytest.mark.parametrize("cls", [FedAvg, Scaffold])
def test_two_rounds_of_the_global_made(federation: Make, cls: type) -> None:
    """SCAFFOLD averages uniformly, but equation 12 has n_k / n."""
    lr = 0.5
    task = toy_task(3)
    sgd = plugins(
        made_optimizer="sgd",
        made_lr=lr,
        made_batch_size=100,
        made_local_epochs=2,
        min_samples=99,
    )
    run = federation(task, cls, plugins=sgd)
    w = {name: t.double().numpy() for name, t in run.strategy.weights["density"].items()}
    shares = np.array(task.sizes) / sum(task.sizes)
    for _ in range(2):
        run.step()
        locals_ = []
        for client in task.clients:
            local = w
            for _ in range(2):
                local = made_step(local, client.train.x.double().numpy(), lr)
            locals_.append(local)
        w = {
            name: sum(p * local[name] for p, local in zip(shares, locals_, strict=True))
            for name in w
        }
        for name, expected in w.items():
            actual = run.strategy.weights["density"][name]
            np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-6)


def outputs(made: dict[str, Tensor], x: np.ndarray) -> np.ndarray:
    """P(x_d = 1 | x_<d) of a MADE with 4 inputs and 8 hidden units, unit by unit.

    The degrees of the hidden units are 1, 1, 1, 2, 2, 2, 3 and 3.
    """
    w = {name: t.double().numpy() for name, t in made.items()}
    degrees = [1, 1, 1, 2, 2, 2, 3, 3]
    hidden = [np.maximum(w["b1"][k] + x[:, :m] @ w["W1"][k, :m], 0) for k, m in enumerate(degrees)]
    logits = []
    for d in range(4):
        seen = [w["W2"][d, k] * hidden[k] for k, m in enumerate(degrees) if m <= d]
        logits.append(w["b2"][d] + sum(seen, np.zeros(len(x))))
    return 1 / (1 + np.exp(-np.stack(logits, 1)))


@pytest.mark.parametrize("features", ["outputs", "conditional"])
def test_what_the_classifier_tells_apart_with_ratio_outputs(
    federation: Make, monkeypatch: pytest.MonkeyPatch, features: str
) -> None:
    """Class 0 is the local MADE's view of the client's own samples, class 1 the global MADE's.

    The classifier is then evaluated at the former.
    """
    fitted = []
    seen = []
    fit_made = densities.fit_made
    classify = densities.classify
    monkeypatch.setattr(
        densities, "fit_made", lambda *args: fitted.append(fit_made(*args)) or fitted[-1]
    )
    monkeypatch.setattr(
        densities, "classify", lambda *args: seen.append(args[:3]) or classify(*args)
    )
    run = federation(toy_task(), FedDisk, plugins=plugins(ratio="outputs", features=features))
    plan = [run.step() for _ in range(4)][-1]
    global_made = run.strategy.weights["density"]
    for msg, local_made, (zeros, ones, at) in zip(plan, fitted, seen, strict=True):
        x = run.workspace.task.clients[msg.pid].train.x.double().numpy()
        for made, actual in ((local_made, zeros), (global_made, ones), (local_made, at)):
            expected = outputs(made, x)
            if features == "conditional":
                expected = x * expected + (1 - x) * (1 - expected)
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


class Linear(nn.Module):
    """Softmax regression in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.double())


def test_the_weighted_round(federation: Make) -> None:
    """Softmax regression, one batch of all samples: (1 / |B|) sum_b w_b l_b, then n_k / n."""
    lr = 0.7
    task = Task(Linear, criterion, toy_task(3).clients, None, 2)
    raw = plugins(ratio="raw", clf_lr=0.3, clf_max_epochs=50)
    run = federation(task, FedAvg, plugins=raw, lr=lr, batch_size=100, epochs=2)
    run.step()
    old = {name: t.numpy().copy() for name, t in run.model.items()}
    weights = [kept(run, pid).double().numpy() for pid in range(3)]
    assert [len(w) for w in weights] == task.sizes
    assert all(w.std() > 1e-3 for w in weights)
    run.step()
    expected = dict.fromkeys(old, 0.0)
    for client, w in zip(task.clients, weights, strict=True):
        x = client.train.x.double().numpy()
        y = client.train.y.numpy()
        n = len(client.train)
        weight = old["head.weight"].copy()
        bias = old["head.bias"].copy()
        for _ in range(2):
            z = x @ weight.T + bias
            p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
            error = (p - np.eye(2)[y]) * w[:, None] / n
            weight = weight - lr * error.T @ x
            bias = bias - lr * error.sum(0)
        expected["head.weight"] += n / sum(task.sizes) * weight
        expected["head.bias"] += n / sum(task.sizes) * bias
    for name, value in expected.items():
        np.testing.assert_allclose(run.model[name], value, rtol=1e-6, atol=1e-9)
