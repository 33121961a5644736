"""Local training: mini-batches, with the points at which methods and plug-ins change it.

Models are trained by `LocalTraining.train_model`, or under engine.vectorize by its twin for several
clients (fedhet/engines/vectorized.py). FedALA's mixing weights, FedGen's generator and FedDisk's
networks have small loops of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedhet.core import optimizers, streams
from fedhet.core.functional import Compiled
from fedhet.core.messages import Broadcast, LocalSettings
from fedhet.core.optimizers import clip_norm, derivative
from fedhet.core.phases import EarlyStopping
from fedhet.core.plugin import STEP_HOOKS, Plugin, Terms, check_hooks, overrides
from fedhet.core.task import Samples
from fedhet.core.trees import AnyTree, Prepared, Tree
from fedhet.core.workspace import Workspace

Objective = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


@dataclass(slots=True)
class Batch:
    """One mini-batch during training.

    Attributes:
        x: inputs (B, ...), ready for the model.
        y: targets (B, ...).
        index: (B,) positions in the training set.
        features: (B, d) what the head receives, or None where the model has no features(x).
        logits: the model's output.
    """

    x: Tensor
    y: Tensor
    index: Tensor
    features: Tensor | None
    logits: Tensor

    @property
    def z(self) -> Tensor:
        """(B, d) the features of a model that has them; ValueError for one that does not."""
        if self.features is None:
            raise ValueError("the model has no features(x) and head(f)")
        return self.features


class LocalTraining:
    """The training half of a client; FedClient adds the messages around it.

    Attributes, set by `receive`:
        msg: the message that is being served.
        pid: the client's number.
        local: the settings of local training in this step.
        active: the plug-ins whose hooks run in this phase.
    """

    msg: Broadcast
    pid: int
    local: LocalSettings
    active: list[Plugin]

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        check_hooks(cls, LocalTraining)

    def receive(self, msg: Broadcast) -> None:
        """Take the message's settings; no plug-in is active yet."""
        self.msg = msg
        self.pid = msg.pid
        self.local = msg.local
        self.activate([])

    def activate(self, plugins: list[Plugin]) -> None:
        """Let the hooks of these plug-ins run. Nothing is prepared or recorded yet."""
        self.active = plugins
        self._prepared: list[Prepared] = [{} for _ in plugins]
        # Hook -> the bound methods that do something, so that a step pays for those only.
        self._hooks: dict[str, list[tuple[Callable[..., Any], Prepared]]] = {
            hook: [
                (getattr(plugin, hook), own)
                for plugin, own in zip(plugins, self._prepared, strict=True)
                if overrides(plugin, Plugin, hook)
            ]
            for hook in STEP_HOOKS
        }
        self._records: dict[str, list[Tensor]] = defaultdict(list)

    # ---- what a method overrides
    def prepare(self, msg: Broadcast) -> Prepared | None:
        """What the hooks of the local steps get as `own`; None for nothing.

        `train` calls it. In other phases, and wherever else models are trained, `own` is empty.
        """

    def optimizer(self, params: dict[str, nn.Parameter], own: Prepared) -> optimizers.Optimizer:
        """A fresh optimiser: nothing is carried from round to round."""
        return optimizers.make(self.local, list(params.values()))

    # The hooks of a step, which obey the same rules as those of a plug-in (fedhet/core/plugin.py).
    def draws(self, n: int) -> Prepared:
        """Random draws for a batch of n samples, which the hooks find in `own`."""
        return {}

    def losses(self, params: AnyTree, batch: Batch, own: Prepared) -> Terms:
        """(B,) per-sample losses."""
        return self.workspace.task.criterion(batch.logits, batch.y)

    def penalty(self, params: AnyTree, batch: Batch, own: Prepared) -> Terms:
        """A scalar to add to the batch loss."""
        return batch.logits.new_zeros(())

    def gradient(self, grads: Tree, params: AnyTree, own: Prepared) -> None:
        """Change the gradient of the trained parameters in place, before the plug-ins do."""

    # ---- the loop
    def train_model(
        self,
        model: nn.Module,
        data: Samples,
        own: Prepared | None = None,
        *,
        beside: dict[str, nn.Parameter] | None = None,
        epochs: int | None = None,
        patience: int | None = None,
        hooks: bool = True,
    ) -> int:
        """Train the model in place on `objective` and return the number of optimiser steps.

        Args:
            model: the model; its parameters that require gradients are trained.
            data: the training set, prepared.
            own: what the method has prepared for its hooks; None for nothing.
            beside: parameters that are trained too, which the method's hooks find in `params`; the
                hooks `gradient` and `scale` do not see their gradients, and `client.clip` bounds
                their norm by itself.
            epochs: at most so many passes over the data; None for what `self.local` says, which
                may be a number of steps.
            patience: stop after so many epochs without a lower mean loss; None for never.
            hooks: whether the plug-ins' hooks run; False for training that the server never sees.
        """
        workspace = self.workspace
        size = self.local.batch_size
        own = dict(own or {})
        of_model = trained(model)
        params = {**of_model, **(beside or {})}
        in_order = list(params.values())
        objective = self.objective(model, data, own, beside=beside, hooks=hooks)
        optimizer = self.optimizer(params, own)
        for wrap, prepared in self._hooks["optimizer"] if hooks else ():
            optimizer = wrap(optimizer, params, prepared)
        changing = overrides(self, LocalTraining, "gradient") or (
            hooks and (self._hooks["gradient"] or self._hooks["scale"])
        )
        compiled = self._compiled(in_order, hooks=hooks) if workspace.speed.compile else None
        weights = self.sample_weights(data) if compiled and hooks else None
        orders = self.orders(len(data))
        augmentation = self.generator("augment")
        n = self.train_mode(model, len(data), size)
        stop = None if patience is None else EarlyStopping(patience)
        steps = 0
        for length in self.local.epoch_sizes(n, epochs):
            order = next(orders).to(workspace.device, non_blocking=True)[:length]
            epoch = data.x.index_select(0, order), data.y[order], order  # faster than data.x[order]
            # On the device: reading the loss of each batch would make every step wait for it.
            epoch_loss = torch.zeros((), dtype=torch.float64, device=workspace.device)
            for x, y, index in zip(*(t.split(size) for t in epoch), strict=True):
                x = workspace.augmented(x, augmentation)
                penalty: Tensor | None = None
                if compiled and len(y) == size:  # each other size would be compiled anew
                    w = None if weights is None else weights[index] / size
                    losses, grads = compiled(x, y, w)
                else:
                    losses, penalty = objective(x, y, index)
                    grads = derivative(losses, penalty, in_order)
                with torch.no_grad():
                    if changing:
                        named = dict(zip(of_model, grads, strict=False))
                        self.gradient(named, of_model, own)
                        if hooks:
                            self.apply_gradient_hooks(named, of_model)
                    if self.local.clip is not None:  # what is trained beside the model by itself
                        of = grads[: len(of_model)], grads[len(of_model) :]
                        for group in filter(None, of):
                            clip_norm(group, self.local.clip)
                    optimizer.step(grads)
                    if stop is not None:
                        loss = losses.mean() if penalty is None else losses.mean() + penalty
                        epoch_loss += loss.double() * len(y)
                steps += 1
            if stop is not None and stop(float(epoch_loss)):
                break
        return steps

    def orders(self, n: int) -> Iterator[Tensor]:
        """The order of n samples in each epoch, a function of (seed, phase, step, client)."""
        generator = self.generator("batches")
        while True:
            yield torch.randperm(n, generator=generator)

    def generator(self, purpose: str) -> torch.Generator:
        """The random stream of this message and purpose, on the CPU."""
        msg = self.msg
        return streams.torch_generator(self.workspace.seed, purpose, msg.phase, msg.step, self.pid)

    def _compiled(self, params: list[nn.Parameter], *, hooks: bool) -> Compiled | None:
        """The gradient by torch.compile, for the parameters that are usually trained.

        None where the batch loss is more than the (weighted) mean of the criterion.
        """
        own = any(overrides(self, LocalTraining, h) for h in ("losses", "penalty", "objective"))
        usual = self.workspace.parameters  # fine-tuning may train others
        as_usual = len(params) == len(usual) and all(map(is_, params, usual))
        if own or not as_usual or (hooks and (self._hooks["losses"] or self._hooks["penalty"])):
            return None
        return self.workspace.compiled

    def objective(
        self,
        model: nn.Module,
        data: Samples,
        own: Prepared | None = None,
        *,
        beside: dict[str, nn.Parameter] | None = None,
        hooks: bool = True,
    ) -> Objective:
        """The batch loss, mean_b(w_b (losses_b + plug-ins' losses_b)) + penalties, in two parts.

        Args:
            model, data, own, beside, hooks: as in `train_model`; `own` gets the draws of a batch.

        Returns:
            (x, y, index) of a batch -> (the terms of the mean (B,), the sum of the penalties, or
            None where nothing has a penalty); `index` are positions in `data`.
        """
        own = {} if own is None else own
        params: AnyTree = {**trained(model), **(beside or {})}
        active = self._hooks if hooks else {hook: [] for hook in STEP_HOOKS}
        weights = self.sample_weights(data) if hooks else None
        features = getattr(model, "features", None)
        drawing, penalties = (
            [(getattr(self, hook), own)] * overrides(self, LocalTraining, hook) + active[hook]
            for hook in ("draws", "penalty")
        )

        def terms(x: Tensor, y: Tensor, index: Tensor) -> tuple[Tensor, Tensor | None]:
            for draw, prepared in drawing:
                prepared |= draw(len(y))
            with self.workspace.autocast():
                z = None if features is None else features(x)
                logits = model(x) if z is None else model.head(z)  # type: ignore[operator]
                batch = Batch(x, y, index, z, logits)
                losses = self._values(self.losses(params, batch, own))
            for hook, prepared in active["losses"]:
                losses = losses + self._values(hook(params, batch, prepared))
            if weights is not None:
                losses = losses * weights[index]
            if not penalties:
                return losses, None
            values = (self._values(hook(params, batch, its)) for hook, its in penalties)
            return losses, sum(values, torch.zeros((), device=x.device))

        return terms

    def _values(self, terms: Terms) -> Tensor:
        """The values of a term, after what is to be recorded has been put aside."""
        if isinstance(terms, Tensor):
            return terms
        values, records = terms
        for name, t in records.items():
            self._records[name].append(t.detach().reshape(-1))
        return values

    def recorded(self, name: str) -> Tensor:
        """(n,) what the hooks have recorded under this name in this message, in their order."""
        return torch.cat(self._records[name])

    def apply_gradient_hooks(self, grads: Tree, params: AnyTree) -> None:
        """Let the active plug-ins change the gradient of these parameters in place."""
        for hook, own in self._hooks["gradient"]:
            hook(grads, params, own)
        for hook, own in self._hooks["scale"]:
            hook(grads, own)

    def full_gradient(self, model: nn.Module, data: Samples, index: Tensor, chunk: int) -> Tree:
        """The gradient of `objective` over the samples at `index`; the model is not changed.

        It is taken in train mode and before every gradient hook, and summed over chunks of `chunk`
        samples. That is exact except for batch norm, which normalises each chunk separately.
        """
        objective = self.objective(model, data)
        params = trained(model)
        index = index[: self.train_mode(model, len(index), chunk)]
        total = [torch.zeros_like(p) for p in params.values()]
        augmentation = self.generator("augment")
        for part in index.split(chunk):
            x = self.workspace.augmented(data.x[part], augmentation)
            grads = derivative(*objective(x, data.y[part], part), list(params.values()))
            torch._foreach_add_(total, grads, alpha=len(part) / len(index))
        return dict(zip(params, total, strict=True))

    def train_mode(self, model: nn.Module, n: int, size: int) -> int:
        """Set the mode and return how many of n samples to use in batches of this size.

        Batch norm cannot train on one sample: a single trailing sample is left out, or batch norm
        runs in eval mode.
        """
        model.train()
        used = usable(model, n, size)
        single = used == n and (n % size == 1 or size == 1)
        if self.workspace.frozen_norms or single:
            for norm in norms(model):
                norm.eval()
        return used

    def sample_weights(self, data: Samples) -> Tensor | None:
        """(n,) the product of the plug-ins' weights, or None where no plug-in has any."""
        total: Tensor | None = None
        for plugin in self.active:
            weights = plugin.sample_weights(data)
            if weights is not None:
                total = weights if total is None else total * weights
        return total


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require gradients, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def usable(model: nn.Module, n: int, size: int) -> int:
    """How many of n samples training uses in batches of this size.

    Batch norm cannot train on one sample: a single one after the last whole batch is left out.
    """
    left_out = bool(norms(model)) and n % size == 1 and n > 1 and size > 1
    return n - left_out


def norms(model: nn.Module) -> list[_BatchNorm]:
    """Return the model's batch norms, identified by type."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]
