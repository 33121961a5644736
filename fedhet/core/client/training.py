"""Local training: mini-batches, with the points at which methods and plug-ins change it.

The loop itself is in descent.py. FedGen's server trains its generator by a small one of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from operator import is_
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedhet.core import streams, trees
from fedhet.core.client import optimizers
from fedhet.core.client.descent import Descent, Values, descend
from fedhet.core.kernel import KINDS, Term
from fedhet.core.messages import Broadcast, LocalSettings, Scalar
from fedhet.core.server.stopping import EarlyStopping
from fedhet.core.targets import Target
from fedhet.core.task import Samples
from fedhet.core.trees import AnyTree, Prepared, Tree
from fedhet.core.workspace import Workspace

Indexed = tuple[Term, int]  # a term, and the place of what it reads in `own`
Columns = tuple[Tensor, ...]  # x, y and positions of samples, and perhaps their weights
NO_DATA = Samples(torch.empty(0), torch.empty(0))


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


class Fitted(NamedTuple):
    """What has become of the parameters by training.

    Attributes:
        params: all tensors of the model after it.
        steps: how many steps were taken.
        records: what the terms have recorded, by name, in the order of the batches.
        start: the tensors with which the first training for the message began.
        beside: the parameters that were trained beside the model's.
        momentum: that of SGD, if some was given.
    """

    params: AnyTree
    steps: int
    records: Mapping[str, Tensor]
    start: AnyTree
    beside: AnyTree = {}
    momentum: Tree = {}


class Trainer:
    """Trains models on one client's data, for one message.

    Args:
        workspace: what the clients of the process share.
        msg: the message.
        identity: of the method, its options and its plug-ins, as far as they change steps.

    Attributes:
        data: the samples to train on, ready for the model.
        terms: those of the plug-ins.
        steps: the optimiser steps that were taken for the message.
        fitted: what was trained last with the plug-ins' terms; None for nothing.
        metrics: further numbers to record.
    """

    def __init__(self, workspace: Workspace, msg: Broadcast, identity: Hashable = None) -> None:
        self.workspace = workspace
        self.msg = msg
        self.data = NO_DATA
        self.terms: list[Term] = []
        self.steps = 0
        self.fitted: Fitted | None = None
        self.metrics: dict[str, float] = {}
        self._identity = identity
        self._held: AnyTree | None = None
        self._first: AnyTree | None = None  # where the first training with these terms has begun

    def holding(self, params: AnyTree) -> nn.Module:
        """The workspace's model with these values."""
        if params is not self._held:
            self._held = None
            self.workspace.load(params)
            self._held = params
        return self.workspace.model

    def fit(
        self,
        start: AnyTree,
        terms: Sequence[Term] = (),
        *,
        data: Samples | None = None,
        loss: Term | None = None,
        epochs: int | None = None,
        patience: int | None = None,
        lr: float | None = None,
        names: Sequence[str] | None = None,
        beside: Mapping[str, nn.Parameter] | None = None,
        momentum: Tree | None = None,
        stream: str = "",
        alone: bool = False,
    ) -> Fitted:
        """Train the model from `start`, by mini-batches.

        Args:
            start: the values with which it begins.
            terms: the method's own.
            data: the samples, ready for the model; None for `data`.
            loss: takes the place of the task's criterion: (B,) losses.
            epochs: how many; None for what the message says, which may be a number of steps.
            patience: stop after so many epochs without a lower mean loss; None for never.
            lr: another rate than the message's.
            names: the parameters to train; None for those of the method's `scope`.
            beside: further parameters, which the terms find in `params`; their gradients are
                clipped by themselves, and terms of other kinds than losses do not see them.
            momentum: the momentum of SGD to begin with, by parameter.
            stream: the name of the random stream of dropout; "" for that of the message.
            alone: without the plug-ins' terms, for training whose result is not sent.
        """
        msg, data = self.msg, self.data if data is None else data
        model, beside = self.holding(start), dict(beside or {})
        self._held = None
        local = msg.local if lr is None else replace(msg.local, lr=lr)
        momentum = {name: t.clone() for name, t in (momentum or {}).items()}
        key = msg.phase, msg.step, msg.pid
        with (
            self.workspace.seeded(stream, *key) if stream else nullcontext(),
            nullcontext() if names is None else only(model, names),
        ):
            declared = [*terms, *(() if alone else self.terms)]
            descent = self.descent(model, data, local, declared, loss, beside, momentum)
            steps = self._descend(descent, model, epochs, patience, local)
        params = self._held = self.workspace.read(list(self.workspace.initial))
        records = {} if alone else joined(descent.recorded)
        self._first = start if self._first is None else self._first
        fitted = Fitted(params, steps, records, self._first, beside, momentum)
        if not alone:
            self.fitted = fitted
        return fitted

    def _descend(
        self,
        descent: Descent,
        model: nn.Module,
        epochs: int | None,
        patience: int | None,
        local: LocalSettings,
    ) -> int:
        """Take the steps of `epochs`, or of what the message says; return their number."""
        total, size, performer = len(descent.columns[1]), descent.size, self.workspace.performer
        n = self.train_mode(model, total, size)
        all_orders = self.orders(total)
        before = self.steps

        def orders() -> Iterator[Tensor]:
            for length in local.epoch_sizes(n, epochs):
                order = next(all_orders)[:length]
                self.steps += -(-len(order) // size)
                yield order

        if patience is None:
            descend(descent, orders(), performer)
        else:
            stop = EarlyStopping(patience)
            for order in orders():
                if stop(float(descend(descent, [order], performer))):
                    break
        return self.steps - before

    def descent(
        self,
        model: nn.Module,
        data: Samples,
        local: LocalSettings,
        terms: Sequence[Term],
        loss: Term | None = None,
        beside: Mapping[str, nn.Parameter] = MappingProxyType({}),
        momentum: Tree | None = None,
    ) -> Descent:
        """The gradient steps of `fit`.

        The batch loss is mean_b(w_b (losses_b + terms_b)) + penalties.
        """
        workspace = self.workspace
        of_model = trained(model)
        params = {**of_model, **beside}
        # Of each kind the functions, and the place of what each reads in `every`.
        by_kind: dict[str, list[Indexed]] = {kind: [] for kind in KINDS}
        every: list[Prepared] = []
        drawing: list[Indexed] = []
        weights: Tensor | None = None
        for term in [*([loss] if loss else []), *terms]:
            if term.kind == "weight":  # with a row for each sample, so no part of `every`
                w = term.f(params, None, term.own)
                weights = w if weights is None else weights * w
                continue
            indexed = term, len(every)
            every.append(term.own)
            if term.draws is not None:
                drawing.append(indexed)
            if term is not loss:
                by_kind[term.kind].append(indexed)
        adding, penalties = by_kind["loss"], by_kind["penalty"]
        changing, scaling = by_kind["gradient"], by_kind["scale"]

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
                if loss is None:
                    losses = workspace.task.criterion(logits, y)
                else:
                    losses = _values(loss, params, batch, every[0], records)
            for term, i in adding:
                losses = losses + _values(term, params, batch, every[i], records)
            for w in weight:
                losses = losses * w
            if not penalties:
                return losses, None, records
            values = (_values(term, params, batch, every[i], records) for term, i in penalties)
            return losses, sum(values, torch.zeros((), device=x.device)), records

        def change(grads: Tree, params: Tree, every: list[Prepared]) -> None:
            of_model_only = dict(zip(of_model, grads.values(), strict=False))
            for term, i in changing:
                add(term, of_model_only, params, every[i])
            for term, i in scaling:
                scale(term, of_model_only, params, every[i])

        def draw(n: int) -> list[Prepared]:
            drawn: list[Prepared] = [{} for _ in every]
            for term, i in drawing:
                drawn[i] |= term.draws(n)  # type: ignore[misc]
            return drawn

        optimizer = optimizers.make(
            local, list(params.values()), [momentum[n] for n in params] if momentum else ()
        )
        for term, _ in by_kind["step"]:
            factors = term.f(params, None, term.own)
            optimizer = optimizers.ScaledSteps(optimizer, *trees.columns(factors, params, factors))
        augment = workspace.task.augment and partial(
            workspace.augmented, generator=self.generator("augment")
        )
        index = torch.arange(len(data), device=workspace.device)
        usual = loss is None and not (adding or penalties)
        return Descent(
            params,
            (data.stored, data.y, index, *(() if weights is None else (weights,))),
            of_batch,
            optimizer,
            local.batch_size,
            module=model,
            own=every,
            change=change if changing or scaling else None,
            exact=bool(drawing or penalties),
            clip=local.clip,
            beside=len(beside),
            draw=draw if drawing else None,
            ready=data.ready,
            augment=augment,
            quick=self._compiled(list(params.values())) if usual else None,
            common=self._common(data, local, loss, terms) if workspace.performer else None,
        )

    def _common(
        self, data: Samples, local: LocalSettings, loss: Term | None, terms: Sequence[Term]
    ) -> Hashable:
        """A key: clients with equal keys take the same steps, and can take them together."""
        task, msg = self.workspace.task, self.msg
        extras = {k: v for k, v in msg.extras.items() if isinstance(v, Scalar)}
        functions = [
            (term.kind, _named(term.f), _named(term.draws), term.factor, term is loss)
            for term in (*([loss] if loss else []), *terms)
        ]
        transform = task.transform if data.ready else None
        read = repr((msg.phase, extras, replace(local, lr=0.0), task.scoring, transform, functions))
        of_target = isinstance(getattr(task.criterion, "__self__", None), Target)
        # A bound method is equal to itself alone, whether or not its object can be compared.
        return self._identity, read, None if of_target else task.criterion.__call__  # type: ignore[operator]

    def orders(self, n: int) -> Iterator[Tensor]:
        """The order of n samples in each epoch, a function of (seed, phase, step, client)."""
        generator = self.generator("batches")
        while True:
            yield torch.randperm(n, generator=generator)

    def generator(self, purpose: str) -> torch.Generator:
        """The random stream of this message and purpose, on the CPU."""
        msg = self.msg
        return streams.torch_generator(self.workspace.seed, purpose, msg.phase, msg.step, msg.pid)

    def _compiled(
        self, params: list[nn.Parameter]
    ) -> Callable[[Columns], tuple[Tensor, list[Tensor]]] | None:
        """The step by torch.compile, for the parameters that are usually trained."""
        if not self.workspace.speed.compile:
            return None
        usual = self.workspace.parameters  # fine-tuning may train others
        if len(params) != len(usual) or not all(map(is_, params, usual)):
            return None
        compiled = self.workspace.compiled

        def quick(columns: Columns) -> tuple[Tensor, list[Tensor]]:
            x, y, _, *weight = columns
            loss, grads = compiled(x, y, weight[0] / len(y) if weight else None)
            return loss * len(y), grads

        return quick

    def gradient(
        self, params: AnyTree, index: Tensor, chunk: int, *, changed: bool = False
    ) -> tuple[Tree, AnyTree]:
        """(the gradient of the local loss, with the plug-ins' terms; the model's tensors after it).

        Args:
            params: where it is taken.
            index: the samples.
            chunk: how many go through the model at a time.
            changed: whether plug-ins change it as they change the gradient of a step.

        It is taken in train mode, and summed over the chunks. That is exact except for batch norm,
        which normalises each chunk separately.
        """
        model = self.holding(params)
        self._held = None
        descent = self.descent(model, self.data, self.msg.local, self.terms)
        whole = replace(descent, size=chunk, quick=None, change=None, clip=None)
        index = index[: self.train_mode(model, len(index), chunk)]
        total = [torch.zeros_like(p) for p in whole.params.values()]
        rest = len(index) % chunk
        for part, size in ((index[: len(index) - rest], chunk), (index[len(index) - rest :], rest)):
            if len(part):
                whole.optimizer = optimizers.Adding(total, size / len(index))
                descend(whole, [part], self.workspace.performer)
        grads = dict(zip(whole.params, total, strict=True))
        if changed and descent.change:
            with torch.no_grad():
                descent.change(grads, descent.params, descent.own)
        after = self._held = self.workspace.read(list(self.workspace.initial))
        self.fitted = Fitted(after, 0, joined(descent.recorded), params)
        return grads, after

    def adapt(
        self,
        start: AnyTree,
        names: Sequence[str],
        optimizer: Callable[[list[Tensor]], optimizers.Optimizer],
        *,
        index: Tensor,
        epochs: int,
        until: Callable[[list[float]], bool],
        stream: str,
    ) -> None:
        """Take steps of another optimiser than the run's, on the loss of the model.

        It is the exception to `fit`, for FedALA, which learns what is no parameter. Neither the
        method's terms, nor plug-ins, nor client.clip change the gradient, the order is the same in
        each epoch, and the model is lost.

        Args:
            start: the values with which the model begins.
            names: the parameters whose gradient it is.
            optimizer: makes it of them; it changes them in place.
            index: the client's own samples in their order.
            epochs: at most so many passes over them.
            until: the mean losses of the epochs so far -> whether it ends.
            stream: the name of the random stream of dropout.
        """
        workspace, msg = self.workspace, self.msg
        with workspace.seeded(stream, msg.phase, msg.step, msg.pid):
            model = self.holding(start)
            self._held = None
            descent = self.descent(model, workspace.train_data(msg.pid), msg.local, ())
            params = trees.pick(descent.params, names)
            steps = optimizer(list(params.values()))
            descent = replace(descent, params=params, optimizer=steps, clip=None)
            used = self.train_mode(model, len(index), msg.local.batch_size)
            index = index[:used].to(workspace.device)
            losses: list[float] = []
            while len(losses) < epochs and not (losses and until(losses)):
                losses.append(float(descend(descent, [index], workspace.performer)) / used)

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


def joined(recorded: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
    """What the batches have recorded, by name, in their order."""
    return {name: torch.cat(parts) for name, parts in recorded.items()}


def add(term: Term, grads: Tree, params: AnyTree, own: Prepared) -> None:
    """Add what a term of the kind "gradient" gives."""
    if added := term.f(params, None, own):
        torch._foreach_add_(*trees.columns(added, grads, added), alpha=term.factor)


def scale(term: Term, grads: Tree, params: AnyTree, own: Prepared) -> None:
    """Multiply by what a term of the kind "scale" gives."""
    if factors := term.f(params, None, own):
        torch._foreach_mul_(*trees.columns(factors, grads, factors))


def _named(f: Callable[..., Any] | None) -> tuple[str, str]:
    """The function, for a comparison: two methods of one name differ by their options only."""
    return getattr(f, "__module__", ""), getattr(f, "__qualname__", "")


def _values(term: Term, params: Tree, batch: Batch, own: Prepared, records: Tree) -> Tensor:
    """The value of a loss or a penalty; what is to be recorded is put aside."""
    given = term.f(params, batch, own)
    value, recorded = given if isinstance(given, tuple) else (given, {})
    expected = () if term.kind == "penalty" else (len(batch.y),)
    if getattr(value, "shape", None) != expected:
        raise TypeError(
            f"the {term.kind} {_named(term.f)[1]} is {trees.kind(value)}; expected is a tensor of"
            f" shape {expected}: {KINDS[term.kind]}"
        )
    records.update(recorded)
    return value  # type: ignore[no-any-return]


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
