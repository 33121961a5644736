"""One client during one message, as the client half of a method or a plug-in sees it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn

from fedhet.core import streams, trees
from fedhet.core.client import optimizers
from fedhet.core.client.descent import Descent, EarlyStopping, Values, descend
from fedhet.core.client.training import (
    Batch,
    Columns,
    alter,
    joined,
    named,
    norms,
    only,
    usable,
    value,
)
from fedhet.core.client.training import Fitted as Fitted
from fedhet.core.kernel import Term
from fedhet.core.messages import Broadcast, LocalSettings, Scalar
from fedhet.core.metrics import outputs
from fedhet.core.targets import Target
from fedhet.core.task import Samples
from fedhet.core.trees import AnyTree, Prepared, Tree
from fedhet.core.workspace import Workspace


class ClientContext:
    """One client's data during one message, with functions that train and evaluate models on them.

    Args:
        workspace: the objects that the clients of the process share: the task, the names and
            initial values of the model, and the settings of privacy.
        msg: the message.
        identity: a key of the method, the plug-ins and their options. Clients with different keys
            never train in one batch.

    Attributes:
        data: the samples to train on, ready for the model, as the plug-ins have changed them.
        terms: the plug-ins' terms.
        steps: the number of optimiser steps that were taken for the message.
        fitted: the last training with the plug-ins' terms; None if there was none.
        metrics: further numbers to record.
    """

    workspace: Workspace
    data: Samples

    def __init__(self, workspace: Workspace, msg: Broadcast, identity: Hashable = None) -> None:
        self.workspace = workspace
        self._msg = msg
        self.terms: list[Term] = []
        self.steps = 0
        self.fitted: Fitted | None = None
        self.metrics: dict[str, float] = {}
        self._identity = identity
        self._held: AnyTree | None = None
        self._first: AnyTree | None = None  # the values with which the first training began

    @property
    def own(self) -> Samples:
        """The client's own training samples, ready for the model."""
        return self.workspace.train_data(self._msg.pid)

    def model(self, params: AnyTree) -> nn.Module:
        """Return the model with these values; the next call or training overwrites them."""
        if params is not self._held:
            self._held = None
            self.workspace.load(params)
            self._held = params
        return self.workspace.model

    @torch.no_grad()
    def outputs(self, params: AnyTree, x: Tensor, part: str = "forward") -> Iterator[Tensor]:
        """Yield the outputs of the model with these values for x, in eval mode and in chunks.

        Args:
            params: the values.
            x: (n, ...) inputs that are ready for the model.
            part: the method of the model to call, such as "features".
        """
        yield from outputs(self.model(params).eval(), x, self.workspace.batcher, part)

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
        """Train the model from `start` on mini-batches.

        Args:
            start: the values of the model at the beginning.
            terms: the method's own terms.
            data: the samples, ready for the model; None: the attribute `data`.
            loss: a term that replaces the task's criterion. Its value is the losses (B,) of the
                samples.
            epochs: the number of epochs; None: the epochs or steps that the message sets.
            patience: stop after this number of epochs in a row without a lower mean loss; None:
                never stop.
            lr: the learning rate; None: the message's.
            names: the parameters to train; None: all parameters of the method's `scope`.
            beside: parameters to train in addition to the model's. The terms find them in `params`.
                Their gradients are clipped separately, and "gradient" and "scale" terms do not
                change these gradients.
            momentum: the initial momentum buffers of SGD, by parameter.
            stream: the name of the random stream of dropout; "": the message's stream.
            alone: leave out the plug-ins' terms. Use it if the client does not send the result.
        """
        msg, data = self._msg, self.data if data is None else data
        model, beside, batcher = self.model(start), dict(beside or {}), self.workspace.batcher
        self._held = None
        local = msg.local if lr is None else replace(msg.local, lr=lr)
        momentum = {name: t.clone() for name, t in (momentum or {}).items()}
        key = msg.phase, msg.step, msg.pid
        with (
            self.workspace.seeded(stream, *key) if stream else nullcontext(),
            nullcontext() if names is None else only(model, names),
        ):
            declared = [*terms, *(() if alone else self.terms)]
            descent = self._descent(model, data, local, declared, loss, beside, momentum)
            steps_before, orders = self.steps, self._epochs(descent, model, local, epochs)
            if patience is None:
                descend(descent, orders, batcher)
            else:
                stop = EarlyStopping(patience)
                any(stop(float(descend(descent, [order], batcher))) for order in orders)
        params = self._held = self.workspace.read(list(self.workspace.initial))
        records = {} if alone else joined(descent.recorded)
        self._first = start if self._first is None else self._first
        fitted = Fitted(params, self.steps - steps_before, records, self._first, beside, momentum)
        if not alone:
            self.fitted = fitted
        return fitted

    def _epochs(
        self, descent: Descent, model: nn.Module, local: LocalSettings, epochs: int | None
    ) -> Iterator[Tensor]:
        """Yield the order of the samples in each epoch, and count the epoch's steps."""
        total, size = len(descent.columns[1]), descent.size
        lengths = local.epoch_sizes(self._train_mode(model, total, size), epochs)
        for length, order in zip(lengths, self._orders(total), strict=False):
            self.steps += -(-length // size)
            yield order[:length]

    def _descent(
        self,
        model: nn.Module,
        data: Samples,
        local: LocalSettings,
        terms: Sequence[Term],
        loss: Term | None = None,
        beside: Mapping[str, nn.Parameter] = MappingProxyType({}),
        momentum: Tree | None = None,
    ) -> Descent:
        """Build the gradient steps of `fit`.

        The batch loss is mean_b(w_b (losses_b + terms_b)) + penalties.
        """
        workspace = self.workspace
        model_params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        params = {**model_params, **beside}
        weights: Tensor | None = None
        for term in terms:
            if term.kind == "weight":
                w = term.f(params, None, term.own)
                weights = w if weights is None else weights * w
        # `Descent.own` has the terms in this order. Weights are not among them: a weight has one
        # entry per sample, so it becomes a column.
        batch_terms = [term for term in (loss, *terms) if term and term.kind != "weight"]
        kinds = {term.kind for term in batch_terms if term is not loss}
        draws = any(term.draws for term in batch_terms)

        def terms_of_kind(kind: str, owns: list[Prepared]) -> Iterator[tuple[Term, Prepared]]:
            for term, own in zip(batch_terms, owns, strict=True):
                if term.kind == kind and term is not loss:
                    yield term, own

        def loss_parts(
            module: nn.Module | None, params: Tree, owns: list[Prepared], columns: Columns
        ) -> Values:
            x, y, index, *weight = columns
            records: Tree = {}
            # If the model has no `head`, ignore its `features`: models of torchvision have
            # `features` and `classifier`, and the classifier need not accept them as they are.
            features = getattr(module, "features", None) if hasattr(module, "head") else None
            with workspace.autocast():
                z = None if features is None else features(x)
                logits = module(x) if z is None else module.head(z)  # type: ignore[misc,operator,union-attr]
                batch = Batch(x, y, index, z, logits, workspace)
                if loss is None:
                    losses = workspace.task.criterion(logits, y)
                else:
                    losses = value(loss, params, batch, owns[0], records)
            for term, own in terms_of_kind("loss", owns):
                losses = losses + value(term, params, batch, own, records)
            for w in weight:
                losses = losses * w
            if "penalty" not in kinds:
                return losses, None, records
            values = (
                value(term, params, batch, own, records)
                for term, own in terms_of_kind("penalty", owns)
            )
            return losses, sum(values, torch.zeros((), device=x.device)), records

        def change(grads: Tree, params: Tree, owns: list[Prepared]) -> None:
            model_grads = dict(zip(model_params, grads.values(), strict=False))
            for kind in ("gradient", "scale"):
                for term, own in terms_of_kind(kind, owns):
                    alter(term, model_grads, params, own)

        def draw(n: int) -> list[Prepared]:
            return [term.draws(n) if term.draws else {} for term in batch_terms]

        optimizer = optimizers.make(
            local, list(params.values()), [momentum[n] for n in params] if momentum else ()
        )
        owns = [term.own for term in batch_terms]
        for term, own in terms_of_kind("step", owns):
            factors = term.f(params, None, own)
            optimizer = optimizers.ScaledSteps(optimizer, *trees.columns(factors, params, factors))
        augment = workspace.task.augment and partial(
            workspace.augmented, generator=self.stream("augment")
        )
        index = torch.arange(len(data), device=workspace.device)
        # torch.compile has compiled only the plain loss of the parameters that the run trains.
        plain = not (loss or kinds & {"loss", "penalty"})
        plain &= [*map(id, params.values())] == [*map(id, workspace.parameters)]
        return Descent(
            params,
            (data.x, data.y, index, *(() if weights is None else (weights,))),
            loss_parts,
            optimizer,
            local.batch_size,
            module=model,
            own=owns,
            change=change if kinds & {"gradient", "scale"} else None,
            exact=draws or "penalty" in kinds,
            clip=local.clip,
            beside=len(beside),
            draw=draw if draws else None,
            augment=augment,
            quick=workspace.compiled if plain and workspace.speed.compile else None,
            common=self._common(local, loss, terms) if workspace.batcher else None,
        )

    def _common(self, local: LocalSettings, loss: Term | None, terms: Sequence[Term]) -> Hashable:
        """Return a key of the functions that the client's steps compute.

        Clients with equal keys compute the same functions on different tensors. So one batch can
        compute the steps of all of them.
        """
        task, msg = self.workspace.task, self._msg
        extras = {k: v for k, v in msg.extras.items() if isinstance(v, Scalar)}
        functions = [
            (term.kind, named(term.f), named(term.draws), term.factor, term is loss)
            for term in (loss, *terms)
            if term
        ]
        read = repr((msg.phase, extras, replace(local, lr=0.0), task.scoring, functions))
        of_target = isinstance(getattr(task.criterion, "__self__", None), Target)
        # Python compares bound methods by the identity of their objects, so this works for a
        # criterion of any type.
        return self._identity, read, None if of_target else task.criterion.__call__  # type: ignore[operator]

    def gradient(
        self, params: AnyTree, index: Tensor, chunk: int, *, scaled: bool = False
    ) -> tuple[Tree, AnyTree]:
        """Compute the gradient of the local loss with the plug-ins' terms, in train mode.

        The gradient is summed over chunks. The sum is exact except for batch norm, which normalises
        each chunk separately.

        Args:
            params: the values of the model.
            index: the samples.
            chunk: the number of samples that pass through the model at a time.
            scaled: whether terms of the kind "scale" multiply the gradient.

        Returns:
            (the gradient, the model's tensors afterwards).
        """
        model = self.model(params)
        self._held = None
        descent = self._descent(model, self.data, self._msg.local, self.terms)
        summing = replace(descent, size=chunk, quick=None, change=None, clip=None)
        index = index[: self._train_mode(model, len(index), chunk)]
        total = [torch.zeros_like(p) for p in summing.params.values()]
        rest = len(index) % chunk
        for part, size in ((index[: len(index) - rest], chunk), (index[len(index) - rest :], rest)):
            if len(part):
                summing.optimizer = optimizers.Adding(total, size / len(index))
                descend(summing, [part], self.workspace.batcher)
        grads = dict(zip(summing.params, total, strict=True))
        with torch.no_grad():
            for kind in ("gradient", "scale")[: 1 + scaled]:
                for term in (term for term in self.terms if term.kind == kind):
                    alter(term, grads, descent.params, term.own)
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
        """Take steps of a given optimiser, instead of the run's, on the model's loss.

        FedALA uses this function instead of `fit`, because FedALA learns values that are not
        parameters of the model. The gradient has no terms of the method or of plug-ins, and is not
        clipped. The order of the samples is the same in each epoch. The model is not returned.

        Args:
            start: the values of the model at the beginning.
            names: the parameters; the optimiser gets their gradients.
            optimizer: makes the optimiser from these parameters; its steps change them in place.
            index: the client's own samples in their order.
            epochs: the largest number of passes over the samples.
            until: a function of the mean losses of the epochs so far: whether to stop.
            stream: the name of the random stream of dropout.
        """
        workspace, msg = self.workspace, self._msg
        with workspace.seeded(stream, msg.phase, msg.step, msg.pid):
            model = self.model(start)
            self._held = None
            descent = self._descent(model, self.own, msg.local, ())
            params = trees.pick(descent.params, names)
            steps = optimizer(list(params.values()))
            descent = replace(descent, params=params, optimizer=steps, clip=None)
            used = self._train_mode(model, len(index), msg.local.batch_size)
            index = index[:used].to(workspace.device)
            losses: list[float] = []
            while len(losses) < epochs and not (losses and until(losses)):
                losses.append(float(descend(descent, [index], workspace.batcher)) / used)

    def _train_mode(self, model: nn.Module, n: int, size: int) -> int:
        """Put the model into train mode, and return how many of n samples to use.

        Batches have `size` samples. Batch norm cannot train on one sample, so a last batch of one
        sample is left out. If every batch has one sample, batch norm runs in eval mode instead.
        """
        model.train()
        used = usable(model, n, size)
        single = used == n and (n % size == 1 or size == 1)
        if self.workspace.frozen_norms or single:
            for norm in norms(model):
                norm.eval()
        return used

    # ---- the random streams of this message
    def _orders(self, n: int) -> Iterator[Tensor]:
        """Yield an order of n samples for each epoch, by (seed, phase, step, client) and epoch."""
        generator = self.stream("batches")
        while True:
            yield torch.randperm(n, generator=generator)

    def stream(self, purpose: str) -> torch.Generator:
        """Return the random stream of this message and purpose, on the CPU.

        The stream "batches" orders the samples of `fit`: torch.randperm(n) for each epoch.
        """
        msg = self._msg
        return streams.torch_generator(self.workspace.seed, purpose, msg.phase, msg.step, msg.pid)
