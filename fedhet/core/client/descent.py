"""Gradient steps: the one loop with which clients train, and a rule for early stopping."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedhet.core.client.optimizers import Optimizer, clip_norm, derivative
from fedhet.core.targets import Scores, Tally
from fedhet.core.task import Samples, Task
from fedhet.core.trees import Prepared, Tree

# The parts of a batch loss: losses (B,), the sum of the penalties or None, tensors to record.
Values = tuple[Tensor, Tensor | None, Tree]
Terms = Callable[[nn.Module | None, Tree, list[Prepared], tuple[Tensor, ...]], Values]


@dataclass(slots=True)
class Descent:
    """The parameters to train, and their loss: mean_b(losses_b) + penalty for every batch.

    Several descents that differ only in the values of tensors and in learning rates can be carried
    out in one batch (fedhet/engines/fused).

    Attributes:
        params: the parameters by name: tensors that require gradients, changed in place.
        columns: tensors (n, ...); a batch has some rows of each.
        terms: (module, params, own, columns of a batch) -> the parts of the loss.
        optimizer: takes the steps.
        size: the number of samples in a batch.
        module: the module that has the parameters, in the mode in which it is trained; None if
            `terms` reads only `params`.
        own: further tensors that `terms` and `change` read.
        change: (gradients by name, params, own) -> None; changes the gradients in place; or None.
        exact: whether a batch must not be padded, because more samples would change its loss.
        clip: the largest L2 norm of a gradient; None for no limit.
        beside: the number of parameters, at the end of `params`, that do not belong to the module.
            Their gradient is clipped separately.
        draw: a function that makes random draws for a batch of n samples, on the CPU: one dict of
            tensors for each entry of `own`, which the draws join; or None.
        augment: changes the first column of a batch at random; or None.
        quick: (columns of a whole batch) -> (losses, gradients), instead of `terms`; or None.
        common: a key of everything that `terms` and `change` read besides their arguments, except
            tensors.
        recorded: the tensors that `terms` has recorded, one for each batch, by name.
    """

    params: dict[str, Any]
    columns: tuple[Tensor, ...]
    terms: Terms
    optimizer: Optimizer
    size: int
    module: nn.Module | None = None
    own: list[Prepared] = field(default_factory=list)
    change: Callable[[Tree, Tree, list[Prepared]], None] | None = None
    exact: bool = False
    clip: float | None = None
    beside: int = 0
    draw: Callable[[int], list[Prepared]] | None = None
    augment: Callable[[Tensor], Tensor] | None = None
    quick: Callable[[tuple[Tensor, ...]], tuple[Tensor, list[Tensor]]] | None = None
    common: Hashable = None
    recorded: dict[str, list[Tensor]] = field(default_factory=dict)

    def batches(self, order: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield the batches of an epoch that takes the samples in this order."""
        parts = [column.index_select(0, order).split(self.size) for column in self.columns]
        for first, *others in zip(*parts, strict=True):
            yield (first if self.augment is None else self.augment(first)), *others

    def clipped(self, grads: list[Tensor], *, rows: bool = False) -> None:
        """Clip the gradient in place; with `rows`, each row of the tensors is a gradient."""
        if self.clip is not None:
            of_module = len(grads) - self.beside
            for part in filter(None, (grads[:of_module], grads[of_module:])):
                clip_norm(part, self.clip, rows=rows)

    def steps(self, order: Tensor) -> Tensor:
        """Take a step on each batch of an epoch, and return the sum of all samples' losses."""
        order = order.to(self.columns[0].device, non_blocking=True)
        names, in_order = list(self.params), list(self.params.values())
        # The total stays on the device: reading the loss of each batch would make each step wait.
        total = torch.zeros((), dtype=torch.float64, device=order.device)
        for batch in self.batches(order):
            n = len(batch[0])
            penalty: Tensor | None = None
            # `quick` would have to be compiled again for every other size.
            if self.quick and n == self.size:
                losses, grads = self.quick(batch)
            else:
                own = self.own
                if self.draw is not None:
                    drawn = [
                        {name: t.to(order.device, non_blocking=True) for name, t in draws.items()}
                        for draws in self.draw(n)
                    ]
                    own = [a | b for a, b in zip(own, drawn, strict=True)]
                losses, penalty, records = self.terms(self.module, self.params, own, batch)
                grads = derivative(losses, penalty, in_order)
                for name, record in records.items():
                    self.recorded.setdefault(name, []).append(record.detach().reshape(-1))
            with torch.no_grad():
                if self.change is not None:
                    self.change(dict(zip(names, grads, strict=True)), self.params, self.own)
                self.clipped(grads)
                self.optimizer.step(grads)
                total += losses.sum() if penalty is None else losses.sum() + penalty * n
        return total


class Batcher(Protocol):
    """Carries out the gradient steps and forward passes of several clients in one batch."""

    def descend(self, descent: Descent, orders: Sequence[Tensor]) -> Tensor:
        """Take the steps of these epochs, and return what `Descent.steps` returns for the last."""

    def forward(self, module: nn.Module, x: Tensor, part: str) -> Tensor:
        """Return the output of the module's method `part`, in eval mode, for x (n, ...)."""

    def assess(
        self, model: nn.Module, parts: Sequence[Samples], task: Task
    ) -> list[tuple[Scores, Tally]]:
        """Evaluate the model on sets of samples, as `fedhet.core.metrics.assess` does."""


def descend(descent: Descent, orders: Iterable[Tensor], batcher: Batcher | None) -> Tensor:
    """Take the steps of several epochs, one for each order of the samples.

    Returns:
        The sum of all samples' losses in the last epoch, float64.
    """
    if batcher is not None:
        return batcher.descend(descent, list(orders))
    total = torch.zeros((), dtype=torch.float64)
    for order in orders:
        total = descent.steps(order)
    return total


@dataclass
class EarlyStopping:
    """Detects when a loss has stopped falling.

    Call it with the loss after each round or epoch. It returns true if the last `patience` losses
    were not below the best loss by more than `tolerance`.
    """

    patience: int
    tolerance: float = 0.0
    best: float = math.inf
    stale: int = 0

    def __call__(self, loss: float) -> bool:
        if loss < self.best - self.tolerance:
            self.best = loss
            self.stale = 0
        else:
            self.stale += 1
        return self.stale >= self.patience
