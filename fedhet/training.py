"""The only training loop: local epochs of mini-batches, with the points at which methods and plug-ins change it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedhet import optimizers, streams
from fedhet.messages import Broadcast, LocalSettings
from fedhet.plugin import Plugin
from fedhet.site import Site, norms
from fedhet.task import Samples


@dataclass(slots=True)
class Batch:
    """One mini-batch: inputs x (B, ...), targets y, positions `index` in the training set, features z (B, d) or None, logits."""

    x: Tensor
    y: Tensor
    index: Tensor
    z: Tensor | None
    logits: Tensor


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
    def train_model(self, model: nn.Module, data: Samples, *, epochs: int, patience: int | None = None, hooks: bool = True) -> int:
        """Train in place and return the number of optimiser steps.

        The batch loss is that of `objective`. `patience` stops after so many epochs without a lower epoch-mean loss.
        `hooks=False` leaves out the plug-ins, for loops that the server never sees.
        """
        site, size = self.site, self.local.batch_size
        used = self._hooks if hooks else self.overridden(())
        params = [p for p in model.parameters() if p.requires_grad]
        gradient = self._gradient(model, data, params, hooks=hooks)
        optimizer = self.optimizer(params)
        for wrap in used["optimizer"]:
            optimizer = wrap(optimizer, params)
        orders = self.orders(len(data))
        self._train_mode(model)
        steps, best, stale = 0, float("inf"), 0
        for _ in range(epochs):
            order = next(orders).to(site.device)
            x, y, epoch_loss = data.x[order], data.y[order], 0.0
            for at in self._batches(model, len(data), size):
                loss, grads = gradient(x[at], y[at], order[at])
                with torch.no_grad():
                    self.gradient(grads)
                    for hook in used["gradient"]:
                        hook(grads)
                    for hook in used["scale"]:
                        hook(grads)
                    optimizer.step(grads)
                steps += 1
                if patience is not None:
                    epoch_loss += float(loss) * len(y[at])
            if patience is not None:
                best, stale = (epoch_loss, 0) if epoch_loss < best else (best, stale + 1)
                if stale >= patience:
                    break
        return steps

    def orders(self, n: int) -> Iterator[Tensor]:
        """The order of n samples in each epoch, a function of (seed, phase, step, client)."""
        draws = torch.Generator().manual_seed(streams.integer(self.site.seed, "batches", self.msg.phase, self.msg.step, self.pid))
        while True:
            yield torch.randperm(n, generator=draws)

    def _gradient(self, model: nn.Module, data: Samples, params: list[nn.Parameter], *, hooks: bool
                  ) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, list[Tensor]]]:
        """(x, y, positions) of a batch -> (loss, gradients) of `objective`."""
        objective = self.objective(model, data, hooks=hooks)

        def eager(x: Tensor, y: Tensor, index: Tensor) -> tuple[Tensor, list[Tensor]]:
            loss = objective(x, y, index)
            return loss.detach(), list(torch.autograd.grad(loss, params, materialize_grads=True))

        if not self.site.speed.compile or model is not self.site.model or not self.plain(hooks):
            return eager
        weights, size, compiled = self.sample_weights(data) if hooks else None, self.local.batch_size, self.site.compiled

        def fast(x: Tensor, y: Tensor, index: Tensor) -> tuple[Tensor, list[Tensor]]:
            if len(y) < size:
                return eager(x, y, index)
            return compiled(x, y, None if weights is None else weights[index] / size)

        return fast

    def plain(self, hooks: bool = True) -> bool:
        """Whether the batch loss is the criterion's (weighted) mean: no loss or penalty of the method's or a plug-in's own."""
        own = any(getattr(type(self), name) is not getattr(LocalTraining, name) for name in ("losses", "penalty", "objective"))
        return not own and not (hooks and (self._hooks["losses"] or self._hooks["penalty"]))

    def objective(self, model: nn.Module, data: Samples, *, hooks: bool = True) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """(x, y, positions in `data`) of a batch -> its loss, mean_b(w_b (losses_b + plug-ins' losses_b)) + penalties."""
        used = self._hooks if hooks else self.overridden(())
        weights = self.sample_weights(data) if hooks else None
        features = getattr(model, "features", None)
        penalties = [p for p in (self.penalty, *used["penalty"]) if getattr(p, "__func__", None) is not LocalTraining.penalty]

        def loss(x: Tensor, y: Tensor, index: Tensor) -> Tensor:
            with self.site.autocast():
                z = None if features is None else features(x)
                batch = Batch(x, y, index, z, model(x) if z is None else model.head(z))  # type: ignore[operator]
                losses = self.losses(batch)
            for hook in used["losses"]:
                losses = losses + hook(batch)
            found = (losses if weights is None else losses * weights[batch.index]).mean()
            for penalty in penalties:
                found = found + penalty(batch)
            return found

        return loss

    def full_gradient(self, model: nn.Module, data: Samples, index: Tensor, chunk: int) -> list[Tensor]:
        """The gradient of `objective` over the samples at `index`, in train mode, before every gradient hook; the model stays.

        It is summed over chunks of so many samples: exact, but for batch norm, which normalises each chunk by itself.
        """
        objective, params = self.objective(model, data), [p for p in model.parameters() if p.requires_grad]
        self._train_mode(model)
        parts = list(self._batches(model, len(index), chunk))
        total = [torch.zeros_like(p) for p in params]
        for at in parts:
            loss = objective(data.x[index[at]], data.y[index[at]], index[at])
            grads = torch.autograd.grad(loss, params, materialize_grads=True)
            torch._foreach_add_(total, grads, alpha=(at.stop - at.start) / parts[-1].stop)
        return total

    def _train_mode(self, model: nn.Module) -> None:
        model.train()
        if self.site.frozen_norms:
            for norm in norms(model):
                norm.eval()

    @staticmethod
    def _batches(model: nn.Module, n: int, size: int) -> Iterator[slice]:
        """The last partial batch is kept; batch norm cannot train on one sample, so a trailing single is dropped or run in eval mode."""
        if (n % size == 1 or size == 1) and norms(model):
            if n > 1 and size > 1:
                n -= 1
            else:
                for norm in norms(model):
                    norm.eval()
        for at in range(0, n, size):
            yield slice(at, min(at + size, n))

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
        """hook name -> the bound methods that do something, so that a step pays only for what is used."""
        hooks = ("optimizer", "losses", "penalty", "gradient", "scale")
        return {h: [getattr(p, h) for p in plugins if getattr(type(p), h) is not getattr(Plugin, h)] for h in hooks}
