"""Local optimisers that take the gradients as a list.

Hooks can thus change the gradients between the backward pass and the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from fedhet.messages import LocalSettings


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
        settings: the learning rate, momentum, weight decay and clipping.
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
        if s.clip is not None:
            clip_norm(grads, s.clip)
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

    def __init__(
        self, optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter], clip: float | None
    ) -> None:
        self.optimizer = optimizer
        self.params = list(params)
        self.clip = clip

    def step(self, grads: list[Tensor]) -> None:
        if self.clip is not None:
            clip_norm(grads, self.clip)
        for parameter, grad in zip(self.params, grads, strict=True):
            parameter.grad = grad
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def make(settings: LocalSettings, params: Sequence[nn.Parameter]) -> Optimizer:
    """Build the optimiser that conf/client selects.

    It is "sgd", or "adam" for torch.optim.Adam with L2 weight decay and the default betas.

    Raises:
        ValueError: the name is unknown.
    """
    if settings.optimizer == "sgd":
        return SGD(params, settings)
    if settings.optimizer == "adam":
        adam = torch.optim.Adam(params, lr=settings.lr, weight_decay=settings.weight_decay)
        return TorchOptimizer(adam, params, settings.clip)
    raise ValueError(f"client.optimizer={settings.optimizer!r} is unknown; choose sgd or adam")
