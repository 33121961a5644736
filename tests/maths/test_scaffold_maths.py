"""SCAFFOLD's control variates, one tensor at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedhet.maths.scaffold import control_change, control_sum, correction


def draw(n: int, seed: int) -> Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("steps", [1, 7])
def test_option_ii_is_the_mean_of_the_visited_gradients(steps: int) -> None:
    """After y <- y - lr (g - c_i + c) with arbitrary gradients, c_i+ must be their mean."""
    c, c_i, x = draw(3, 0)
    gradients, lr, y = draw(steps, 1), 0.03, x
    for g in gradients:
        y = y - lr * (g + correction(c, c_i))
    c_plus = c_i + control_change(c, y - x, steps * lr)
    torch.testing.assert_close(c_plus, gradients.mean(0), rtol=1e-10, atol=1e-10)


def test_the_correction_vanishes_if_the_client_has_the_servers_control() -> None:
    c = draw(1, 2)[0]
    assert not correction(c, c).any()


def test_the_sum_follows_the_clients() -> None:
    """Started at sum_j lambda_j c_j and updated by some clients, it is the new sum."""
    old, new = draw(5, 3), draw(5, 4)
    before, after = [1.0, 0.5, 2.0, 1.0, 3.0], [1.0, 1.5, 0.2, 1.0, 3.0]
    took_part = [1, 2]
    total = control_sum(
        sum(w * c for w, c in zip(before, old, strict=True)),
        [after[i] for i in took_part],
        [new[i] for i in took_part],
        [before[i] for i in took_part],
        [old[i] for i in took_part],
    )
    expected = sum(after[i] * (new[i] if i in took_part else old[i]) for i in range(5))
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)


def test_participants_must_match() -> None:
    with pytest.raises(ValueError, match="zip"):
        control_sum(torch.zeros(4), [1.0], list(draw(2, 5)), [1.0], list(draw(1, 6)))
