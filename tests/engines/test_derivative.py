"""`optimizers.derivative`: the gradient of a mean of losses plus a penalty."""

from __future__ import annotations

import pytest
import torch

from fedhet.core.client.optimizers import derivative


def test_a_loss_for_each_pixel_has_the_gradient_of_its_mean() -> None:
    w = torch.ones(3, requires_grad=True)
    x = torch.arange(12.0).reshape(4, 3)
    expected = torch.autograd.grad((w * x).mean(), w)[0]
    torch.testing.assert_close(derivative(w * x, None, [w])[0], expected)


def test_gradients_that_share_memory_are_separated() -> None:
    """Autograd gives both terms of a sum one tensor, and the terms of a mean a broadcast one.

    A weight decay in place would change both, or fail.
    """
    a, b, c = (torch.ones(3, requires_grad=True) for _ in range(3))
    grads = derivative((a + b) ** 2, c.sum(), [a, b, c])
    torch._foreach_add_(grads, [a, 2 * b, 3 * c])
    for grad, expected in zip(grads, (4 / 3 + 1, 4 / 3 + 2, 4.0), strict=True):
        torch.testing.assert_close(grad, torch.full((3,), float(expected)))


def test_unused_parameters_get_zeros_and_a_loss_without_parameters_is_refused() -> None:
    a = torch.ones(3, requires_grad=True)
    b = torch.ones(2, requires_grad=True)
    for penalty in (None, torch.ones(())):  # a constant penalty too
        used, unused = derivative(a * 4, penalty, [a, b])
        assert torch.equal(used, torch.full((3,), 4 / 3))
        assert torch.equal(unused, torch.zeros(2))
    losses = a**2 * 2
    used, unused = derivative(losses, None, [a, b])
    assert not used.requires_grad and not unused.requires_grad
    with pytest.raises(RuntimeError, match="second time"):  # the graph is freed
        derivative(losses, None, [a, b])
    with pytest.raises(RuntimeError, match="does not require grad"):
        derivative(torch.ones(4), None, [a])
