"""Local optimisers that take a list of gradients, so that hooks can change it between backward and
step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from fedhet.messages import LocalSettings


class Optimizer(Protocol):
    def step(self, grads: list[Tensor]) -> None:
        """Move the parameters; `grads` may be changed."""


def clip_norm(grads: list[Tensor], limit: float) -> None:
    """Scale the gradient in place to an L2 norm of at most `limit`
    (torch.nn.utils.clip_grad_norm_)."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    torch._foreach_mul_(grads, (limit / (norm + 1e-6)).clamp(max=1.0))


class SGD:
    """torch.optim.SGD without its per-step bookkeeping, the same bits: g += wd w; d = momentum d +
    g; w -= lr d.

    `buffers` are the d to start from, changed in place; without them d starts with the first
    gradient."""

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


class Torch:
    """Any torch optimiser."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter], clip: float | None
    ) -> None:
        self.optimizer, self.params, self.clip = optimizer, list(params), clip

    def step(self, grads: list[Tensor]) -> None:
        if self.clip is not None:
            clip_norm(grads, self.clip)
        for parameter, grad in zip(self.params, grads, strict=True):
            parameter.grad = grad
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def make(settings: LocalSettings, params: Sequence[nn.Parameter]) -> Optimizer:
    """The optimiser of conf/client: "sgd", or "adam" (torch.optim.Adam, L2 weight decay, default
    betas)."""
    if settings.optimizer == "sgd":
        return SGD(params, settings)
    if settings.optimizer == "adam":
        return Torch(
            torch.optim.Adam(params, lr=settings.lr, weight_decay=settings.weight_decay),
            params,
            settings.clip,
        )
    raise ValueError(f"client.optimizer={settings.optimizer!r}; known are sgd and adam")
