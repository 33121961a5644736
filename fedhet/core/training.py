"""Local training: mini-batches, with the points at which methods and plug-ins change it.

The loop itself is in descent.py. FedGen's server trains its generator by a small one of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedhet.core import optimizers, streams, trees
from fedhet.core.descent import Descent, Values, descend
from fedhet.core.kernel import Term
from fedhet.core.messages import Broadcast, LocalSettings, Scalar
from fedhet.core.phases import EarlyStopping
from fedhet.core.plugin import STEP_HOOKS, Plugin, Terms, check_hooks, overrides
from fedhet.core.targets import Target
from fedhet.core.task import Samples
from fedhet.core.trees import AnyTree, Prepared, Tree
from fedhet.core.workspace import Workspace

Indexed = tuple[Callable[..., Any], int]  # a function, and the place of what it reads in `own`
Columns = tuple[Tensor, ...]  # x, y and positions of samples, and perhaps their weights


@dataclass(slots=True)
class Batch:
    """One mini-batch during training.

    Attributes:
        x: inputs (B, ...), ready for the model.
        y: targets (B, ...).
        index: (B,) positions in the training set.
        features: (B, d) what the head receives, or None where the model does not have both
            features(x) and head(f).
        logits: the model's output.
        workspace: the task's criterion, `teacher`, and `autocast`.
    """

    x: Tensor
    y: Tensor
    index: Tensor
    features: Tensor | None
    logits: Tensor
    workspace: Workspace

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
        steps: the optimiser steps that `train_model` has taken for this message.
    """

    msg: Broadcast
    pid: int
    local: LocalSettings
    active: list[Plugin]
    steps: int

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
        self.steps = 0
        self.activate([])

    def activate(self, plugins: list[Plugin]) -> None:
        """Let the hooks of these plug-ins run. Nothing is prepared or recorded yet."""
        self.active = plugins
        self._prepared: list[Prepared] = [{} for _ in plugins]
        # Hook -> the bound methods that do something, so that a step pays for those only.
        # With the position of what it reads in [the method's, *the plug-ins'].
        self._hooks: dict[str, list[tuple[Callable[..., Any], int]]] = {
            hook: [
                (getattr(plugin, hook), i)
                for i, plugin in enumerate(plugins, 1)
                if overrides(plugin, Plugin, hook)
            ]
            for hook in STEP_HOOKS
        }
        self._records: dict[str, list[Tensor]] = defaultdict(list)
        # Of each plug-in, the terms that it has declared for this message.
        self._terms: list[list[Term]] = [[] for _ in plugins]

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
        terms: Sequence[Term] = (),
        loss: Term | None = None,
        momentum: Tree | None = None,
    ) -> int:
        """Train the model in place, and return the number of optimiser steps.

        Args:
            model: the model; its parameters that require gradients are trained.
            data: the training set, prepared.
            own: what the method has prepared for its hooks; None for nothing.
            beside: parameters that are trained too, which the method's hooks find in `params`; the
                hooks `gradient` and `scale` do not see their gradients.
            epochs: at most so many passes over the data; None for what `self.local` says, which
                may be a number of steps.
            patience: stop after so many epochs without a lower mean loss; None for never.
            hooks: whether the plug-ins' hooks run; False for training that the server never sees.
            terms: the method's own.
            loss: takes the place of the method's losses; None for these.
            momentum: of SGD, changed in place; None for zeros.
        """
        workspace = self.workspace
        size = self.local.batch_size
        descent = self.descent(
            model,
            data,
            own,
            beside=beside,
            hooks=hooks,
            terms=terms,
            loss=loss,
            momentum=momentum,
        )
        n = self.train_mode(model, len(data), size)
        all_orders = self.orders(len(data))
        before = self.steps

        def orders() -> Iterator[Tensor]:
            for length in self.local.epoch_sizes(n, epochs):
                order = next(all_orders)[:length]
                self.steps += -(-len(order) // size)
                yield order

        if patience is None:
            descend(descent, orders(), workspace.performer)
            return self.steps - before
        stop = EarlyStopping(patience)
        for order in orders():
            if stop(float(descend(descent, [order], workspace.performer))):
                break
        return self.steps - before

    def descent(
        self,
        model: nn.Module,
        data: Samples,
        own: Prepared | None = None,
        *,
        beside: dict[str, nn.Parameter] | None = None,
        hooks: bool = True,
        terms: Sequence[Term] = (),
        loss: Term | None = None,
        momentum: Tree | None = None,
    ) -> Descent:
        """The gradient steps of `train_model`.

        The batch loss is mean_b(w_b (losses_b + plug-ins' losses_b)) + penalties.

        Args:
            model, data, own, beside, hooks, terms, loss, momentum: as in `train_model`.
        """
        workspace = self.workspace
        of_model = trained(model)
        params = {**of_model, **(beside or {})}
        own = dict(own or {})
        every = [own, *self._prepared]
        drawing, penalties, changing = (
            [(getattr(self, hook), 0)] * overrides(self, LocalTraining, hook)
            for hook in ("draws", "penalty", "gradient")
        )
        adding: list[Indexed] = []
        scaling: list[Indexed] = []
        wrapping: list[Indexed] = []
        weighing: list[Tensor] = []
        base: Indexed = self.losses, 0
        if loss is not None:
            base = loss.f, len(every)
            every.append(loss.own)

        def add(some: Sequence[Term]) -> None:
            for term in some:
                if term.kind == "weight":  # with a row for each sample, so no part of `own`
                    weighing.append(term.f(params, None, term.own))
                    continue
                i = len(every)
                every.append(term.own)
                if term.draws is not None:
                    drawing.append((term.draws, i))
                if term.kind in ("loss", "penalty"):
                    (adding if term.kind == "loss" else penalties).append((term.f, i))
                elif term.kind == "gradient":
                    changing.append((partial(_add, term), i))
                elif term.kind == "scale":
                    scaling.append((partial(_scale, term), i))
                else:
                    wrapping.append((partial(_masked, term), i))

        add(terms)
        for i, (plugin, declared) in enumerate(
            zip(self.active if hooks else [], self._terms if hooks else [], strict=True), 1
        ):
            own_hooks = {
                hook: [pair for pair in pairs if pair[1] == i]
                for hook, pairs in self._hooks.items()
            }
            adding += own_hooks["losses"]
            penalties += own_hooks["penalty"]
            drawing += own_hooks["draws"]
            changing += own_hooks["gradient"]
            scaling += own_hooks["scale"]
            wrapping += own_hooks["optimizer"]
            own_weights = plugin.sample_weights(data)
            weighing += [] if own_weights is None else [own_weights]
            add(declared)
        weights: Tensor | None = None
        for one in weighing:
            weights = one if weights is None else weights * one

        def of_batch(
            module: nn.Module | None, params: Tree, every: list[Prepared], columns: Columns
        ) -> Values:
            x, y, index, *weight = columns
            records: Tree = {}
            # Some models' features are not what a head reads (torchvision's have a classifier).
            features = getattr(module, "features", None) if hasattr(module, "head") else None
            with workspace.autocast():
                z = None if features is None else features(x)
                logits = module(x) if z is None else module.head(z)  # type: ignore[misc,operator,union-attr]
                batch = Batch(x, y, index, z, logits, workspace)
                losses = _values(base[0](params, batch, every[base[1]]), records)
            for hook, i in adding:
                losses = losses + _values(hook(params, batch, every[i]), records)
            for w in weight:
                losses = losses * w
            if not penalties:
                return losses, None, records
            values = (_values(hook(params, batch, every[i]), records) for hook, i in penalties)
            return losses, sum(values, torch.zeros((), device=x.device)), records

        def change(grads: Tree, params: Tree, every: list[Prepared]) -> None:
            of_model_only = dict(zip(of_model, grads.values(), strict=False))
            for hook, i in changing:
                hook(of_model_only, params, every[i])
            for hook, i in scaling:
                hook(of_model_only, every[i])

        def draw(n: int) -> list[Prepared]:
            drawn: list[Prepared] = [{} for _ in every]
            for hook, i in drawing:
                drawn[i] |= hook(n)
            return drawn

        if momentum is None:
            optimizer = self.optimizer(params, own)  # type: ignore[arg-type]
        else:
            buffers = list(momentum.values())
            optimizer = optimizers.SGD(list(params.values()), self.local, buffers)
        for wrap, i in wrapping:
            optimizer = wrap(optimizer, params, every[i])
        declared_terms = [*terms, *([loss] if loss else [])]
        if hooks:
            declared_terms += [term for some in self._terms for term in some]
        generator = self.generator("augment")
        augment = (
            None
            if workspace.task.augment is None
            else partial(workspace.augmented, generator=generator)
        )
        index = torch.arange(len(data), device=workspace.device)
        return Descent(
            params,
            (data.stored, data.y, index, *(() if weights is None else (weights,))),
            of_batch,
            optimizer,
            self.local.batch_size,
            module=model,
            own=every,
            change=change if changing or scaling else None,
            exact=bool(drawing or penalties),
            clip=self.local.clip,
            beside=len(params) - len(of_model),
            draw=draw if drawing else None,
            ready=data.ready,
            augment=augment,
            quick=self._compiled(
                list(params.values()), usual_loss=loss is None and not (adding or penalties)
            ),
            common=self._common(data, declared_terms, hooks=hooks) if workspace.performer else None,
            recorded=self._records,
        )

    def _common(self, data: Samples, terms: Sequence[Term], *, hooks: bool) -> Hashable:
        """What the hooks read beside their arguments, as far as it is no tensor."""
        extras = {k: v for k, v in self.msg.extras.items() if isinstance(v, Scalar)}
        plugins = tuple((type(plugin), plugin.digest()) for plugin in self.active if hooks)
        local = replace(self.local, lr=0.0)
        task = self.workspace.task
        transform = task.transform if data.ready else None
        functions = [(term.kind, _named(term.f), _named(term.draws), term.factor) for term in terms]
        read = repr((self.msg.phase, extras, local, task.scoring, transform, functions))
        of_target = isinstance(getattr(task.criterion, "__self__", None), Target)
        # A bound method is equal to itself alone, whether or not its object can be compared.
        return self.identity, plugins, read, None if of_target else task.criterion.__call__  # type: ignore[operator]

    @property
    def identity(self) -> Hashable:
        """What clients have in common whose hooks do the same."""
        return type(self).__qualname__, type(self).__module__

    def orders(self, n: int) -> Iterator[Tensor]:
        """The order of n samples in each epoch, a function of (seed, phase, step, client)."""
        generator = self.generator("batches")
        while True:
            yield torch.randperm(n, generator=generator)

    def generator(self, purpose: str) -> torch.Generator:
        """The random stream of this message and purpose, on the CPU."""
        msg = self.msg
        return streams.torch_generator(self.workspace.seed, purpose, msg.phase, msg.step, self.pid)

    def _compiled(
        self, params: list[nn.Parameter], *, usual_loss: bool
    ) -> Callable[[Columns], tuple[Tensor, list[Tensor]]] | None:
        """The step by torch.compile, for the parameters that are usually trained.

        None where the batch loss is more than the (weighted) mean of the criterion.
        """
        if not self.workspace.speed.compile:
            return None
        own = overrides(self, LocalTraining, "losses") or not usual_loss
        usual = self.workspace.parameters  # fine-tuning may train others
        as_usual = len(params) == len(usual) and all(map(is_, params, usual))
        if own or not as_usual:
            return None
        compiled = self.workspace.compiled

        def quick(columns: Columns) -> tuple[Tensor, list[Tensor]]:
            x, y, _, *weight = columns
            loss, grads = compiled(x, y, weight[0] / len(y) if weight else None)
            return loss * len(y), grads

        return quick

    def recorded(self, name: str) -> Tensor:
        """(n,) what the hooks have recorded under this name in this message, in their order.

        It is empty, (0,), where no step was taken.
        """
        return torch.cat(self._records[name] or [torch.empty(0)])

    def apply_gradient_hooks(self, grads: Tree, params: AnyTree) -> None:
        """Let the active plug-ins change the gradient of these parameters in place."""
        every = [{}, *self._prepared]
        for hook, i in self._hooks["gradient"]:
            hook(grads, params, every[i])
        declared = [term for some in self._terms for term in some]
        for term in declared:
            if term.kind == "gradient":
                _add(term, grads, params, term.own)
        for hook, i in self._hooks["scale"]:
            hook(grads, every[i])
        for term in declared:
            if term.kind == "scale":
                _scale(term, grads, term.own)

    def full_gradient(self, model: nn.Module, data: Samples, index: Tensor, chunk: int) -> Tree:
        """The gradient of `objective` over the samples at `index`; the model is not changed.

        It is taken in train mode and before every gradient hook, and summed over chunks of `chunk`
        samples. That is exact except for batch norm, which normalises each chunk separately.
        """
        descent = replace(self.descent(model, data), size=chunk, quick=None, change=None, clip=None)
        index = index[: self.train_mode(model, len(index), chunk)]
        total = [torch.zeros_like(p) for p in descent.params.values()]
        rest = len(index) % chunk
        for part, size in ((index[: len(index) - rest], chunk), (index[len(index) - rest :], rest)):
            if len(part):
                descent.optimizer = optimizers.Adding(total, size / len(index))
                descend(descent, [part], self.workspace.performer)
        return dict(zip(descent.params, total, strict=True))

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


def _add(term: Term, grads: Tree, params: AnyTree, own: Prepared) -> None:
    """Add what a term of the kind "gradient" gives."""
    added = term.f(params, None, own)
    if added:
        torch._foreach_add_(*trees.columns(added, grads, added), alpha=term.factor)


def _scale(term: Term, grads: Tree, own: Prepared) -> None:
    """Multiply by what a term of the kind "scale" gives."""
    factors = term.f({}, None, own)
    if factors:
        torch._foreach_mul_(*trees.columns(factors, grads, factors))


def _masked(
    term: Term, inner: optimizers.Optimizer, params: AnyTree, own: Prepared
) -> optimizers.Optimizer:
    """An optimiser with steps that a term of the kind "step" scales."""
    factors = term.f(params, None, own)
    return optimizers.Masked(inner, *trees.columns(factors, params, factors))


def _named(f: Callable[..., Any] | None) -> tuple[str, str]:
    """The function, for a comparison: two methods of one name differ by their options only."""
    return getattr(f, "__module__", ""), getattr(f, "__qualname__", "")


def _values(terms: Terms, records: Tree) -> Tensor:
    """The values of a term, after what is to be recorded has been put aside."""
    if isinstance(terms, Tensor):
        return terms
    values, recorded = terms
    records.update(recorded)
    return values


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require gradients, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@contextmanager
def only(model: nn.Module, names: Container[str]) -> Iterator[None]:
    """Train these parameters of the model, and no others, as long as the context lasts.

    Args:
        model: the model.
        names: names of parameters.
    """
    before = {p: p.requires_grad for p in model.parameters()}
    try:
        for name, p in model.named_parameters():
            p.requires_grad_(name in names)
        yield
    finally:
        for p, trains in before.items():
            p.requires_grad_(trains)


def usable(model: nn.Module, n: int, size: int) -> int:
    """How many of n samples training uses in batches of this size.

    Batch norm cannot train on one sample: a single one after the last whole batch is left out.
    """
    left_out = bool(norms(model)) and n % size == 1 and n > 1 and size > 1
    return n - left_out


def norms(model: nn.Module) -> list[_BatchNorm]:
    """Return the model's batch norms, identified by type."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]
