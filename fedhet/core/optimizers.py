"""The gradient of a batch loss, and local optimisers that take it as a list.

Hooks can thus change it between the backward pass and the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from fedhet.core.messages import LocalSettings

_ENGINE = torch.autograd.Variable._execution_engine


def derivative(losses: Tensor, penalty: Tensor | None, params: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of losses.mean() + penalty with respect to `params`.

    Each tensor has memory of its own, because hooks and the step change gradients in place. A
    parameter that plays no part in the loss gets zeros.
    """
    # The mean is passed on as a constant gradient of its terms, which saves two kernels.
    share = torch.full_like(losses, 1 / losses.numel())
    outputs: tuple[Tensor, ...] = (losses,)
    weights: tuple[Tensor, ...] = (share,)
    if penalty is not None and penalty.requires_grad:
        outputs = (losses, penalty)
        weights = (share, torch.ones_like(penalty))
    # torch.autograd.grad makes the same call after checks that take a tenth of a small model's step
    # and that import sympy, which takes .4 s.
    derivatives = _ENGINE.run_backward(
        outputs,
        weights,
        keep_graph=False,
        create_graph=False,
        inputs=tuple(params),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    grads = [
        torch.zeros_like(p) if g is None else g for g, p in zip(derivatives, params, strict=True)
    ]
    # Autograd gives the terms of a sum one tensor, and the terms of a mean a broadcast number.
    if len({g.data_ptr() for g in grads}) < len(grads) or any(0 in g.stride() for g in grads):
        grads = [g.clone(memory_format=torch.contiguous_format) for g in grads]
    return grads


class Optimizer(Protocol):
    """A local optimiser."""

    def step(self, grads: list[Tensor]) -> None:
        """Update the parameters; `grads` may be changed in place."""


def clip_norm(grads: list[Tensor], limit: float) -> None:
    """Scale the gradient in place to an L2 norm of at most `limit`, as torch's clip_grad_norm_."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    torch._foreach_mul_(grads, (limit / (norm + 1e-6)).clamp(max=1.0))


class SGD:
    """torch.optim.SGD without its bookkeeping in every step, with the same bits.

    g <- g + weight_decay w;  d <- momentum d + g;  w <- w - lr d.

    Args:
        params: the parameters w.
        settings: the learning rate, momentum and weight decay.
        buffers: the initial momentum buffers d, which are changed in place. Without them, d is
            initialised with the first gradient.
    """

    def __init__(
        self, params: Sequence[Tensor], settings: LocalSettings, buffers: list[Tensor] | None = None
    ) -> None:
        self.params: list[Tensor] = list(params)
        self.settings = settings
        self.buffers = buffers

    def step(self, grads: list[Tensor]) -> None:
        s = self.settings
        if s.weight_decay:
            torch._foreach_add_(grads, self.params, alpha=s.weight_decay)
        if s.momentum or self.buffers is not None:
            if self.buffers is None:
                self.buffers = [g.clone() for g in grads]
            else:
                torch._foreach_mul_(self.buffers, s.momentum)
                torch._foreach_add_(self.buffers, grads)
            grads = self.buffers
        torch._foreach_add_(self.params, grads, alpha=-s.lr)


class TorchOptimizer:
    """An adapter for any optimiser of torch.optim."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> None:
        self.optimizer = optimizer
        self.params = list(params)

    def step(self, grads: list[Tensor]) -> None:
        for parameter, grad in zip(self.params, grads, strict=True):
            parameter.grad = grad
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def make(settings: LocalSettings, params: Sequence[nn.Parameter]) -> Optimizer:
    """Build the optimiser that conf/client selects.

    It is "sgd", or "adam" for torch.optim.Adam with L2 weight decay and the default betas.
    """
    if settings.optimizer == "sgd":
        return SGD(params, settings)
    adam = torch.optim.Adam(params, lr=settings.lr, weight_decay=settings.weight_decay)
    return TorchOptimizer(adam, params)
