"""The gradient of a batch loss, and local optimisers that take it as a list.

Hooks can therefore change the gradient between the backward pass and the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from fedhet.core.messages import LocalSettings

B1, B2, EPS = 0.9, 0.999, 1e-8  # torch.optim.Adam's defaults
_ENGINE = torch.autograd.Variable._execution_engine


def derivative(losses: Tensor, penalty: Tensor | None, params: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradient of losses.mean() + penalty with respect to `params`.

    Each tensor has memory of its own, because hooks and the step change gradients in place.
    """
    # Instead of computing the mean, give each loss the gradient 1 / B, which saves two kernels.
    share = torch.full_like(losses, 1 / losses.numel())
    if penalty is not None and penalty.requires_grad:
        return gradients([losses, penalty], [share, torch.ones_like(penalty)], params)
    return gradients([losses], [share], params)


def gradients(
    outputs: Sequence[Tensor], weights: Sequence[Tensor], params: Sequence[Tensor]
) -> list[Tensor]:
    """Return the gradient of the weighted sum of the outputs' entries, in memory of its own.

    A parameter that does not affect the sum gets zeros.
    """
    # torch.autograd.grad makes the same call, but its checks take a tenth of a small model's step
    # and import sympy, which takes .4 s.
    derivatives = _ENGINE.run_backward(
        tuple(outputs),
        tuple(weights),
        keep_graph=False,
        create_graph=False,
        inputs=tuple(params),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    grads = [
        torch.zeros_like(p) if g is None else g for g, p in zip(derivatives, params, strict=True)
    ]
    # Autograd returns the same tensor for all terms of a sum, and a broadcast number for a mean.
    if len({g.data_ptr() for g in grads}) < len(grads) or any(0 in g.stride() for g in grads):
        grads = [g.clone(memory_format=torch.contiguous_format) for g in grads]
    return grads


class Optimizer(Protocol):
    """A local optimiser."""

    def step(self, grads: list[Tensor]) -> None:
        """Update the parameters; `grads` may be changed in place."""


def clip_norm(grads: list[Tensor], limit: float, *, rows: bool = False) -> None:
    """Scale the gradient in place to an L2 norm of at most `limit`, as clip_grad_norm_ of torch.

    Args:
        grads: the gradient.
        limit: the largest norm.
        rows: whether each row of the tensors is a gradient with its own norm.
    """
    if rows:
        norms = torch.stack([g.reshape(len(g), -1).norm(dim=1) for g in grads]).norm(dim=0)
        torch._foreach_mul_(grads, by_row((limit / (norms + 1e-6)).clamp(max=1.0), grads))
        return
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    torch._foreach_mul_(grads, (limit / (norm + 1e-6)).clamp(max=1.0))


def by_row(values: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Reshape (K,) numbers so that they multiply the rows of tensors (K, ...)."""
    return [values.to(t.dtype).view(-1, *[1] * (t.ndim - 1)) for t in like]


def add_multiple(tensors: list[Tensor], others: list[Tensor], factor: float | Tensor) -> None:
    """Add `factor` times the others in place; with (K,) factors, each row has its own factor."""
    if isinstance(factor, Tensor):
        torch._foreach_addcmul_(tensors, others, by_row(factor, others))
    else:
        torch._foreach_add_(tensors, others, alpha=factor)


class SGD:
    """torch.optim.SGD without its bookkeeping in every step; the results are equal bit for bit.

    g <- g + weight_decay w;  d <- momentum d + g;  w <- w - lr d.

    Args:
        params: the parameters w.
        settings: the learning rate, momentum and weight decay.
        buffers: the initial momentum buffers d, which are changed in place; None: zeros.
    """

    def __init__(
        self, params: Sequence[Tensor], settings: LocalSettings, buffers: list[Tensor] | None = None
    ) -> None:
        self.params: list[Tensor] = list(params)
        self.settings = settings
        if buffers is None and settings.momentum:
            buffers = [torch.zeros_like(p) for p in self.params]
        self.buffers = buffers

    def step(self, grads: list[Tensor]) -> None:
        s = self.settings
        if s.weight_decay:
            torch._foreach_add_(grads, self.params, alpha=s.weight_decay)
        if self.buffers is not None:
            torch._foreach_mul_(self.buffers, s.momentum)
            torch._foreach_add_(self.buffers, grads)
            grads = self.buffers
        add_multiple(self.params, grads, -s.lr)


class Adam:
    """torch.optim.Adam with default betas and L2 weight decay, equal bit for bit on the CPU.

    m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2;
    w <- w - lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps).

    Args:
        params: the parameters w.
        settings: the learning rate and weight decay.
    """

    def __init__(self, params: Sequence[Tensor], settings: LocalSettings) -> None:
        self.params: list[Tensor] = list(params)
        self.settings = settings
        self.first = [torch.zeros_like(p) for p in params]
        self.second = [torch.zeros_like(p) for p in params]
        self.t: float | Tensor = 0.0

    def step(self, grads: list[Tensor]) -> None:
        s = self.settings
        if s.weight_decay:
            torch._foreach_add_(grads, self.params, alpha=s.weight_decay)
        self.t += 1
        torch._foreach_lerp_(self.first, grads, 1 - B1)
        torch._foreach_mul_(self.second, B2)
        torch._foreach_addcmul_(self.second, grads, grads, value=1 - B2)
        rate, root = s.lr / (1 - B1**self.t), (1 - B2**self.t) ** 0.5
        scale = torch._foreach_sqrt(self.second)
        torch._foreach_div_(scale, by_row(root, scale) if isinstance(root, Tensor) else root)
        torch._foreach_add_(scale, EPS)
        if isinstance(rate, Tensor):
            add_multiple(self.params, list(torch._foreach_div(self.first, scale)), -rate)
        else:
            torch._foreach_addcdiv_(self.params, self.first, scale, value=-rate)


class Adding:
    """Sums up gradients: it takes no step, but adds `factor` times each gradient to `total`."""

    def __init__(self, total: list[Tensor], factor: float) -> None:
        self.total = total
        self.factor = factor

    def step(self, grads: list[Tensor]) -> None:
        add_multiple(self.total, grads, self.factor)


class ScaledSteps:
    """An optimiser that scales another one's steps entry by entry, weight decay included.

    w <- w_before + factor (w - w_before), exact where a factor is 0 or 1.
    """

    def __init__(self, inner: Optimizer, params: list[Tensor], factors: list[Tensor]) -> None:
        self._inner = inner
        self._params = params
        self._factors = factors

    def step(self, grads: list[Tensor]) -> None:
        before = [p.detach().clone() for p in self._params]
        self._inner.step(grads)
        masked = torch._foreach_lerp(before, self._params, self._factors)
        torch._foreach_copy_(self._params, masked)


def make(
    settings: LocalSettings, params: Sequence[Tensor], momentum: Sequence[Tensor] = ()
) -> Optimizer:
    """Build the optimiser that conf/client selects, "sgd" or "adam".

    Args:
        settings: the settings.
        params: the parameters to train.
        momentum: the initial momentum buffers of SGD, changed in place; empty for zeros.
    """
    if settings.optimizer == "adam":
        return Adam(params, settings)
    return SGD(params, settings, list(momentum) or None)
