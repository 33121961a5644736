"""SCAFFOLD's control variates: the equations, and the server's sum."""

from __future__ import annotations

import torch
from maths.cases import named_case
from maths.controls import replaced, step_of
from torch import Tensor

from fedhet.core.kernel import State
from fedhet.methods.scaffold import Scaffold, option_ii


def draw(n: int, seed: int) -> Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_option_ii_is_the_mean_of_the_visited_gradients() -> None:
    """After y <- y - lr (g - c_i + c) with arbitrary gradients, c_i+ must be their mean."""
    for steps in [1, 7]:
        with named_case(steps):
            c, c_i, x = draw(3, 0)
            gradients, lr, y = draw(steps, 1), 0.03, x
            for g in gradients:
                y = y - lr * (g + c - c_i)
            c_plus = c_i + option_ii({"w": c}, {"w": y - x}, steps * lr)["w"]
            torch.testing.assert_close(c_plus, gradients.mean(0), rtol=1e-10, atol=1e-10)


def test_c_follows_the_weighted_controls_of_all_clients() -> None:
    """After each step c is sum_j lambda_j c_j / sum_j lambda_j, over all clients."""
    clients = 5
    x = draw(1, 0)[0]
    scaffold, step = Scaffold(control="gradient"), step_of(x, clients)
    state: State = {"total": {"x": torch.zeros_like(x)}, "lambda": {}}
    c_all = torch.zeros(clients, 4, dtype=torch.float64)
    factors = torch.ones(clients, dtype=torch.float64)  # lambda
    steps = [{0: 1.0, 1: 0.5, 2: 2.0}, {1: 3.0, 2: 0.2}, {4: 7.0}]
    for seed, weights in enumerate(steps):
        c_plus = draw(clients, seed)
        updates = [replaced(i, c_all[i], c_plus[i], x, weight) for i, weight in weights.items()]
        state = scaffold.merge(step, state, {"x": x}, iter(updates)).state
        for pid, weight in weights.items():
            c_all[pid] = c_plus[pid]
            factors[pid] = len(weights) * weight / sum(weights.values())
    c = scaffold.broadcast(step, state)["c"]
    assert isinstance(c, dict)
    expected = (factors[:, None] * c_all).sum(0) / factors.sum()
    torch.testing.assert_close(c["x"], expected, rtol=1e-12, atol=1e-12)
