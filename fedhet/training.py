"""The only training loop: local epochs of mini-batches, with the points at which methods and
plug-ins change it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedhet import optimizers, streams
from fedhet.messages import Broadcast, LocalSettings
from fedhet.models.base import norms
from fedhet.plugin import Plugin
from fedhet.site import Site
from fedhet.task import Samples


@dataclass(slots=True)
class Batch:
    """One mini-batch: inputs x (B, ...), targets y, positions `index` in the training set, features
    z (B, d) or None, logits."""

    x: Tensor
    y: Tensor
    index: Tensor
    z: Tensor | None
    logits: Tensor


_ENGINE = torch.autograd.Variable._execution_engine
Objective = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


def derivative(losses: Tensor, penalty: Tensor | None, params: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of losses.mean() + penalty, each tensor with memory of its own: hooks and the
    step change them in place."""
    # the mean is a constant gradient of its terms, which spares two kernels
    share = torch.full_like(losses, 1 / losses.numel())
    outputs, weights = (
        ((losses,), (share,))
        if penalty is None or not penalty.requires_grad
        else ((losses, penalty), (share, torch.ones_like(penalty)))
    )
    # torch.autograd.grad ends here too, after checks that take a tenth of a small model's step and
    # import sympy, .4 s.
    found = _ENGINE.run_backward(
        outputs,
        weights,
        keep_graph=False,
        create_graph=False,
        inputs=tuple(params),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    grads = [torch.zeros_like(p) if g is None else g for g, p in zip(found, params, strict=True)]
    # Autograd gives the terms of a sum one tensor, and the terms of a mean a broadcast number.
    if len({g.data_ptr() for g in grads}) < len(grads) or any(0 in g.stride() for g in grads):
        grads = [g.clone(memory_format=torch.contiguous_format) for g in grads]
    return grads


class LocalTraining:
    """What a client is while it trains; FedClient adds the messages around it."""

    site: Site
    msg: Broadcast
    pid: int
    local: LocalSettings
    active: list[Plugin]
    _hooks: dict[str, list[Any]]

    # ---- what a method overrides
    def losses(self, batch: Batch) -> Tensor:
        """(B,) per-sample losses."""
        return self.site.task.criterion(batch.logits, batch.y)

    def penalty(self, batch: Batch) -> Tensor | None:
        """A scalar to add to the batch loss."""
        return None

    def gradient(self, grads: list[Tensor]) -> None:
        """Change the gradient of the trained parameters in place, before the plug-ins."""

    def optimizer(self, params: list[nn.Parameter]) -> optimizers.Optimizer:
        """A fresh optimiser: nothing is carried from round to round."""
        return optimizers.make(self.local, params)

    # ---- the loop
    def train_model(
        self,
        model: nn.Module,
        data: Samples,
        *,
        epochs: int,
        patience: int | None = None,
        hooks: bool = True,
    ) -> int:
        """Train in place and return the number of optimiser steps.

        The batch loss is that of `objective`. `patience` stops after so many epochs without a lower
        epoch-mean loss. `hooks=False` leaves out the plug-ins, for loops that the server never
        sees."""
        site, size = self.site, self.local.batch_size
        used = self._hooks if hooks else self.overridden(())
        params = [p for p in model.parameters() if p.requires_grad]
        gradient = self._gradient(model, data, params, hooks=hooks)
        optimizer = self.optimizer(params)
        for wrap in used["optimizer"]:
            optimizer = wrap(optimizer, params)
        orders, draws = self.orders(len(data)), self._draws("augment")
        n = self._train_mode(model, len(data), size)
        steps, best, stale = 0, float("inf"), 0
        for _ in range(epochs):
            order, epoch_loss = next(orders).to(site.device)[:n], 0.0
            for x, y, index in zip(
                *(t.split(size) for t in (site.gathered(data.x, order), data.y[order], order)),
                strict=True,
            ):
                losses, grads = gradient(site.augmented(x, draws), y, index)
                with torch.no_grad():
                    self.gradient(grads)
                    for hook in used["gradient"]:
                        hook(grads)
                    for hook in used["scale"]:
                        hook(grads)
                    optimizer.step(grads)
                steps += 1
                if patience is not None:
                    epoch_loss += float(losses.mean()) * len(y)
            if patience is not None:
                best, stale = (epoch_loss, 0) if epoch_loss < best else (best, stale + 1)
                if stale >= patience:
                    break
        return steps

    def orders(self, n: int) -> Iterator[Tensor]:
        """The order of n samples in each epoch, a function of (seed, phase, step, client)."""
        draws = self._draws("batches")
        while True:
            yield torch.randperm(n, generator=draws)

    def _draws(self, purpose: str) -> torch.Generator:
        return torch.Generator().manual_seed(
            streams.integer(self.site.seed, purpose, self.msg.phase, self.msg.step, self.pid)
        )

    def _gradient(
        self, model: nn.Module, data: Samples, params: list[nn.Parameter], *, hooks: bool
    ) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, list[Tensor]]]:
        """(x, y, positions) of a batch -> (what has the batch loss for its mean, the loss's
        gradient)."""
        objective = self.objective(model, data, hooks=hooks)

        def eager(x: Tensor, y: Tensor, index: Tensor) -> tuple[Tensor, list[Tensor]]:
            losses, penalty = objective(x, y, index)
            return (
                losses.detach() if penalty is None else (losses.mean() + penalty).detach()
            ), derivative(losses, penalty, params)

        own = self.site.parameters  # a fine-tuning may train others
        same = len(params) == len(own) and all(a is b for a, b in zip(params, own, strict=True))
        if not (self.site.speed.compile and same and self.plain(hooks)):
            return eager
        weights, size, compiled = (
            self.sample_weights(data) if hooks else None,
            self.local.batch_size,
            self.site.compiled,
        )

        def fast(x: Tensor, y: Tensor, index: Tensor) -> tuple[Tensor, list[Tensor]]:
            if len(y) < size:
                return eager(x, y, index)
            # partial batches would be compiled anew
            return compiled(x, y, None if weights is None else weights[index] / size)

        return fast

    def plain(self, hooks: bool = True) -> bool:
        """Whether the batch loss is the criterion's (weighted) mean: no loss or penalty of the
        method's or a plug-in's own."""
        own = any(
            getattr(type(self), name) is not getattr(LocalTraining, name)
            for name in ("losses", "penalty", "objective")
        )
        return not own and not (hooks and (self._hooks["losses"] or self._hooks["penalty"]))

    def objective(self, model: nn.Module, data: Samples, *, hooks: bool = True) -> Objective:
        """The batch loss, mean_b(w_b (losses_b + plug-ins' losses_b)) + penalties, in its two
        parts.

        Returns: (x, y, positions in `data`) of a batch -> (the terms of the mean (B,), the sum of
        the penalties or None)."""
        used = self._hooks if hooks else self.overridden(())
        weights = self.sample_weights(data) if hooks else None
        features = getattr(model, "features", None)
        penalties = [
            p
            for p in (self.penalty, *used["penalty"])
            if getattr(p, "__func__", None) is not LocalTraining.penalty
        ]

        def terms(x: Tensor, y: Tensor, index: Tensor) -> tuple[Tensor, Tensor | None]:
            with self.site.autocast():
                z = None if features is None else features(x)
                batch = Batch(x, y, index, z, model(x) if z is None else model.head(z))  # type: ignore[operator]
                losses = self.losses(batch)
            for hook in used["losses"]:
                losses = losses + hook(batch)
            if weights is not None:
                losses = losses * weights[index]
            return losses, (
                sum((penalty(batch) for penalty in penalties), torch.zeros((), device=x.device))
                if penalties
                else None
            )

        return terms

    def full_gradient(
        self, model: nn.Module, data: Samples, index: Tensor, chunk: int
    ) -> list[Tensor]:
        """The gradient of `objective` over the samples at `index`, in train mode, before every
        gradient hook; the model stays.

        It is summed over chunks of so many samples: exact, but for batch norm, which normalises
        each chunk by itself."""
        objective, params = (
            self.objective(model, data),
            [p for p in model.parameters() if p.requires_grad],
        )
        index = index[: self._train_mode(model, len(index), chunk)]
        total, draws = [torch.zeros_like(p) for p in params], self._draws("augment")
        for part in index.split(chunk):
            grads = derivative(
                *objective(self.site.augmented(data.x[part], draws), data.y[part], part), params
            )
            torch._foreach_add_(total, grads, alpha=len(part) / len(index))
        return total

    def _train_mode(self, model: nn.Module, n: int, size: int) -> int:
        """Set the mode and return how many of n samples to use in batches of this size.

        Batch norm cannot train on one sample: a trailing single one is left out, or batch norm runs
        in eval mode."""
        model.train()
        found = norms(model)
        single = bool(found) and (n % size == 1 or size == 1)
        drop = single and n > 1 and size > 1
        if self.site.frozen_norms or (single and not drop):
            for norm in found:
                norm.eval()
        return n - drop

    def sample_weights(self, data: Samples) -> Tensor | None:
        """(n,) the product of the plug-ins' weights, or None where nobody weighs."""
        total: Tensor | None = None
        for plugin in self.active:
            if type(plugin).sample_weights is not Plugin.sample_weights:
                weights = plugin.sample_weights(data)
                if weights is not None:
                    total = weights if total is None else total * weights
        return total

    def overridden(self, plugins: Sequence[Plugin]) -> dict[str, list[Any]]:
        """hook name -> the bound methods that do something, so that a step pays only for what is
        used."""
        hooks = ("optimizer", "losses", "penalty", "gradient", "scale")
        return {
            h: [getattr(p, h) for p in plugins if getattr(type(p), h) is not getattr(Plugin, h)]
            for h in hooks
        }
