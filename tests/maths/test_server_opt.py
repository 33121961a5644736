"""Server optimisers, compared with torch's own and with closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from maths.cases import named_case
from torch import Tensor

from fedhet.core.errors import ConfigError
from fedhet.core.server.server_opt import FedAvgM, FedOpt, ServerOptimizer

X = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)


def deltas(rounds: int = 5) -> Tensor:
    return torch.randn(rounds, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def walk(optimizer: ServerOptimizer, moves: Tensor) -> list[Tensor]:
    """The server's value after each round, in which clients propose to move by `moves[t]`."""
    out, x, state = [], X, {}
    for move in moves:
        new, state = optimizer.step(state, {"x": x}, {"x": x + move})
        x = new["x"]
        out.append(x)
    return out


def test_fedavgm_is_torch_sgd_on_the_pseudo_gradient() -> None:
    for nesterov in [False, True]:
        with named_case(nesterov):
            w = torch.nn.Parameter(X.clone())
            reference = torch.optim.SGD([w], lr=0.3, momentum=0.8, nesterov=nesterov)
            values = walk(FedAvgM(lr=0.3, beta=0.8, nesterov=nesterov), deltas())
            for value, move in zip(values, deltas(), strict=True):
                w.grad = -move
                reference.step()
                torch.testing.assert_close(value, w.detach(), rtol=1e-12, atol=1e-12)


def test_fedadam_is_adam_without_bias_correction() -> None:
    """The moments in closed form, after t rounds of the same delta.

    m = (1 - b1^t) delta, and v = b2^t v0 + (1 - b2^t) delta^2.
    """
    b1, b2, tau, v0, lr = 0.9, 0.99, 1e-3, 0.02, 0.1
    delta = deltas(1)[0]
    x = X
    optimizer = FedOpt(kind="adam", lr=lr, beta1=b1, beta2=b2, tau=tau, v0=v0)
    for t, value in enumerate(walk(optimizer, delta.expand(4, -1)), start=1):
        m = (1 - b1**t) * delta
        v = b2**t * v0 + (1 - b2**t) * delta**2
        x = x + lr * m / (v.sqrt() + tau)
        torch.testing.assert_close(value, x, rtol=1e-12, atol=1e-12)


def test_fedadagrad_adds_up_the_squares() -> None:
    moves, x, v = deltas(), X, torch.full_like(X, 1e-6)
    for value, move in zip(walk(FedOpt(kind="adagrad", lr=0.2), moves), moves, strict=True):
        v = v + move**2  # v0 is tau^2 = 1e-6
        x = x + 0.2 * move / (v.sqrt() + 1e-3)
        torch.testing.assert_close(value, x, rtol=1e-12, atol=1e-12)


def test_fedyogi_moves_v_by_a_bounded_amount_towards_the_square() -> None:
    """v changes by exactly (1 - b2) delta^2: up if it is below delta^2, down if it is above."""
    optimizer = FedOpt(kind="yogi", beta2=0.9, v0=0.25)
    move = torch.tensor([1.0, 0.5, 0.1], dtype=torch.float64)  # above, equal, below v
    _, state = optimizer.step({}, {"x": X}, {"x": X + move})
    expected = 0.25 + 0.1 * torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64) * move**2
    torch.testing.assert_close(state["v"]["x"], expected, rtol=1e-9, atol=1e-12)


def test_the_first_step_is_bounded() -> None:
    """With v0 = tau^2, no coordinate moves by more than lr (1 - b1) / sqrt(1 - b2).

    This holds however large the pseudo-gradient is.
    """
    optimizer = FedOpt(kind="adam", lr=0.1)
    moved = optimizer.step({}, {"x": X}, {"x": X + 1e6 * deltas(1)[0]})[0]["x"] - X
    bound = 0.1 * 0.1 / math.sqrt(0.01)
    assert float(moved.abs().max()) <= bound
    assert float(moved.abs().min()) == pytest.approx(bound, rel=1e-5)


def test_the_server_moves_in_the_direction_of_the_clients() -> None:
    """With a wrong sign, a server optimiser would climb instead of descending."""
    for sign in [1.0, -1.0]:
        for kind in ["momentum", "adam", "yogi", "adagrad"]:
            with named_case(sign, kind):
                optimizer = FedAvgM() if kind == "momentum" else FedOpt(kind=kind)
                for value in walk(optimizer, sign * torch.ones(3, 3, dtype=torch.float64)):
                    assert (sign * (value - X) > 0).all()


def test_bad_options_are_reported() -> None:
    cases = [
        (FedAvgM, {"lr": 0}),
        (FedAvgM, {"lr": float("nan")}),
        (FedAvgM, {"beta": 1.0}),
        (FedAvgM, {"beta": -0.1}),
        (FedAvgM, {"nesterov": 1}),
        (FedOpt, {"kind": "adamw"}),
        (FedOpt, {"kind": "adam", "tau": 0}),
        (FedOpt, {"kind": "adam", "beta1": 1}),
        (FedOpt, {"kind": "adam", "beta2": -1}),
        (FedOpt, {"kind": "adam", "v0": -1}),
        (FedOpt, {"kind": "adam", "lr": -1}),
    ]
    for cls, options in cases:
        with (
            named_case(cls, options),
            pytest.raises(ConfigError, match=rf"server_opt\.{list(options)[-1]}="),
        ):
            cls(**options)
