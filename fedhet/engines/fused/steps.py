"""Gradient steps, and forward passes, of several models as one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from fedhet.core.client.descent import Descent
from fedhet.core.client.functional import Frozen
from fedhet.core.client.optimizers import derivative, gradients
from fedhet.core.metrics import FORWARD_BATCH
from fedhet.core.trees import Prepared, Tree
from fedhet.engines.fused import stacks
from fedhet.engines.fused.stacks import at_rows, mapped, put_back, put_rows, stack, tensors
from fedhet.engines.fused.traces import traces_of

CLOSE = 0.02  # relative: what reads the wrong tensors is farther off, and bfloat16 is not
NOTHING = 1e-5  # the norm of a gradient that is rounding alone, as where a loss is constant
LEAST_WIDTH = 64  # below which a padded batch takes hardly longer
State = tuple[Tree, Tree, list[Prepared], Any]  # parameters, other parameters, own, optimiser


@dataclass
class Training:
    """What one client asks for: the steps of epochs with these orders of its samples.

    Attributes:
        descent: what is trained, and how.
        orders: of the samples, in each epoch.
        alone: whether it is carried out without others.
    """

    descent: Descent
    orders: list[Tensor]
    alone: bool = False

    @property
    def form(self) -> Hashable:
        """What such trainings must have in common to be carried out as one."""
        return self.kind, id(self) if self.alone else None

    @cached_property
    def kind(self) -> Hashable:
        """What trainings must have in common for the hooks of one to serve for all."""
        d = self.descent
        columns = tuple((c.shape[1:], c.dtype, c.device) for c in d.columns)
        layers = None if d.module is None else (stacks.layers(d.module), d.module.training)
        flags = tuple(one is None for one in (d.change, d.draw, d.augment))
        return d.common, d.size, d.clip, columns, layers, stacks.form(self.state), flags

    @cached_property
    def state(self) -> State:
        """All tensors that a step reads or changes, beside the samples."""
        d = self.descent
        trained = {id(p) for p in d.params.values()}
        named = () if d.module is None else d.module.named_parameters()
        return d.params, {k: p for k, p in named if id(p) not in trained}, d.own, d.optimizer

    @staticmethod
    @torch.no_grad()
    def perform(requests: Sequence[Training]) -> list[Tensor]:
        """Take all steps, and return for each training the sum of the losses in its last epoch.

        All take their first step together; those with more batches go on without the others.
        """
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i].lengths))
        trainings = [requests[i] for i in order]
        batches = StackedBatches(trainings)
        lengths, device = batches.lengths, batches.device
        widths = [one.width for one in trainings]
        step = StackedStep(trainings[0].descent, trainings[0].kind)
        exact = step.like.exact
        stacked = stack([one.state for one in trainings])
        # Rates are not on the device yet.
        every: State = mapped(lambda t: t.to(device, non_blocking=True), stacked)
        state, rows = every, len(trainings)
        totals = torch.zeros(rows, dtype=torch.float64, device=device)
        for t in range(len(lengths[0])):
            going = sum(len(own) > t for own in lengths[:rows])
            if going < rows:  # in the memory of `every`, which has the others as they are now
                state, rows = at_rows(state, slice(0, going)), going
            parts = _parts([own[t] for own in lengths[:rows]] if exact else widths[:rows], device)
            for part, chosen, width_ in parts:
                # Each part has a stack of its own, and an optimiser that counts its steps.
                its_state = state if len(parts) == 1 else at_rows(state, chosen)
                sizes, those = [lengths[row][t] for row in part], [trainings[row] for row in part]
                columns, weights = batches.at(t, part, chosen, sizes, width_)
                check = t == 0 and those[-1] is not trainings[0] and not step.traces.checked
                losses = step(its_state, columns, weights, those, sizes, check=check)
                step.traces.checked |= check
                totals[chosen] += losses * batches.counts[chosen, t]
                if its_state is not state:
                    put_rows((its_state[0], its_state[3]), chosen, (state[0], state[3]))
        moves: list[tuple[Tensor, Tensor]] = []
        for row, one in enumerate(trainings):
            own = one.descent.params, one.descent.optimizer
            put_back((every[0], every[3]), row, own, len(one.lengths), moves)
        torch._foreach_copy_([into for into, _ in moves], [row for _, row in moves])
        return [totals[order.index(i)] for i in range(len(requests))]

    @property
    def lengths(self) -> list[int]:
        """The number of samples in each batch."""
        size = self.descent.size
        parts = (divmod(len(order), size) for order in self.orders)
        return [n for whole, rest in parts for n in [size] * whole + [rest] * bool(rest)]

    @property
    def width(self) -> int:
        """The samples in each batch once it is padded."""
        return width(max(map(len, self.orders)), self.descent.size)

    def positions(self) -> Tensor:
        """(steps, size): those of each batch's samples, and 0 where a batch has fewer."""
        size = self.descent.size
        padded = [functional.pad(order, (0, -len(order) % size)) for order in self.orders]
        return torch.cat([order.view(-1, size) for order in padded])


def width(n: int, most: int) -> int:
    """How many rows to give to n samples, so that the tensors of several clients are of one shape.

    It depends on nothing else: with other shapes matrices are multiplied in another order, and the
    bytes of a client would depend on those beside it.
    """
    return min(most, max(LEAST_WIDTH, 1 << (n - 1).bit_length()))


def padded(t: Tensor, n: int) -> Tensor:
    """The tensor with n rows; those that it lacks are zeros."""
    return t if len(t) == n else torch.cat([t, t.new_zeros(n - len(t), *t.shape[1:])])


def _samples(descent: Descent) -> Hashable:
    """Which samples these are: their tensors, but for the positions, which are made anew."""
    x, *others = descent.columns
    return id(x), *(id(t) for i, t in enumerate(others) if i != 1)


class StackedBatches:
    """The batches of several trainings, the longest first.

    Attributes:
        lengths: of each training, the number of samples in each of its batches.
        counts: (K, steps) of each batch of a training's last epoch the number of its samples, and 0
            of others; float64.
    """

    def __init__(self, trainings: Sequence[Training]) -> None:
        self.lengths = [one.lengths for one in trainings]
        self._descents = [one.descent for one in trainings]
        # The samples of several trainings may be the same.
        different = {_samples(descent): descent.columns for descent in self._descents}
        sizes = [len(x) for x, *_ in different.values()]
        offsets = dict(zip(different, accumulate(sizes, initial=0), strict=False))
        self._columns = [torch.cat(parts) for parts in zip(*different.values(), strict=True)]
        self.device = self._columns[0].device
        width = max(one.width for one in trainings)
        index = [one.positions()[:, :width] + offsets[_samples(one.descent)] for one in trainings]
        lengths = pad_sequence([torch.tensor(own) for own in self.lengths], batch_first=True)
        counts = lengths.double()
        for row, (one, own) in enumerate(zip(trainings, self.lengths, strict=True)):
            counts[row, : len(own) - -(-len(one.orders[-1]) // one.descent.size)] = 0
        # One transfer of each to an accelerator, whatever the number of steps.
        self._index = pad_sequence(index, batch_first=True).to(self.device, non_blocking=True)
        self.counts = counts.to(self.device, non_blocking=True)
        lengths = lengths.float().to(self.device, non_blocking=True)[..., None]
        self._weights = (torch.arange(width, device=self.device) < lengths) / lengths.clamp(min=1)

    def at(
        self, t: int, rows: list[int], chosen: slice | Tensor, sizes: list[int], width: int
    ) -> tuple[list[Tensor], Tensor]:
        """The columns of the t-th batches (K, B, ...), and the weights of their losses (K, B).

        Args:
            t: which batches.
            rows: of which trainings.
            chosen: the same rows as an index.
            sizes: of the batches.
            width: what they are padded to, with samples that they do not count.
        """
        index = self._index[chosen, t, :width]
        flat = index.reshape(-1)
        columns = [
            column.index_select(0, flat).view(*index.shape, *column.shape[1:])
            for column in self._columns
        ]
        if self._descents[0].augment is not None:
            for k, (row, n) in enumerate(zip(rows, sizes, strict=True)):
                columns[0][k, :n] = self._descents[row].augment(columns[0][k, :n])  # type: ignore[misc]
        return columns, self._weights[chosen, t, :width]


Part = tuple[list[int], Any, int]  # rows that take a step at once; their index; their width


def _parts(widths: list[int], device: torch.device) -> list[Part]:
    """The parts of a step in which the batch of each row has such a width."""
    different = sorted({*widths})
    if len(different) == 1:
        return [(list(range(len(widths))), slice(len(widths)), widths[0])]
    parts = [[row for row, own in enumerate(widths) if own == n] for n in different]
    every = zip(parts, different, strict=True)
    return [(rows, torch.tensor(rows, device=device), n) for rows, n in every]


class StackedStep:
    """A gradient step of several models, whose descents have one form.

    Args:
        like: one of them.
        kind: that of their trainings.
    """

    def __init__(self, like: Descent, kind: Hashable) -> None:
        self.traces = traces_of(kind)
        self.like = like
        self._module: Frozen | None = None
        if like.module is not None:
            self._module = Frozen(deepcopy(like.module), training=like.module.training)
            names = {id(p): name for name, p in like.params.items()}
            self._names = {name: names.get(id(p), "") for name, p in like.module.named_parameters()}

    def __call__(
        self,
        state: State,
        columns: list[Tensor],
        weights: Tensor,
        trainings: list[Training],
        sizes: list[int],
        *,
        check: bool,
    ) -> Tensor:
        """Take the step, and return the batch losses (K,).

        Args:
            state: what is trained, and what the loss reads.
            columns: the batches.
            weights: those of the samples' losses.
            trainings: those whose state it is.
            sizes: of their batches.
            check: whether the gradient of the last one is compared with what its own hooks say.
        """
        params, fixed, own, optimizer = state
        descents = [one.descent for one in trainings]
        if descents[0].draw is not None:
            draws = [d.draw(n) for d, n in zip(descents, sizes, strict=True)]  # type: ignore[misc]
            own = [a | b for a, b in zip(own, stack(draws), strict=True)]
        read = tensors((fixed, own))

        def batch_loss(*given: Tensor) -> tuple[Tensor, Tree]:
            parts = iter(given)
            values = dict(zip(params, parts, strict=False))
            at = dict(zip(map(id, read), parts, strict=False))
            others, its_own = mapped(lambda t: at[id(t)], (fixed, own))
            module = None
            if self._module is not None:
                module = self._module(
                    {k: values[name] if name else others[k] for k, name in self._names.items()}
                )
            *batch, weights = parts
            losses, penalty, records = self.like.terms(module, values, its_own, tuple(batch))
            total = (losses * weights).sum()
            return total if penalty is None else total + penalty, records

        def results(*given: Tensor) -> tuple[Tensor, list[Tensor], Tree]:
            with torch.enable_grad():
                leaves = [p.detach().requires_grad_() for p in given[: len(params)]]
                losses, records = vmap(batch_loss)(*leaves, *given[len(params) :])
                grads = gradients([losses], [torch.ones_like(losses)], leaves)
            return losses.detach(), grads, {name: r.detach() for name, r in records.items()}

        given = *params.values(), *read, *columns, weights
        losses, grads, records = self.traces.results(results, given, weights.shape)
        if self.like.change is not None:
            self.like.change(dict(zip(params, grads, strict=True)), params, own)
        self.like.clipped(grads, rows=True)
        if check:
            its_own, *its_batch = (mapped(lambda t: t[-1], one) for one in (own, *columns))
            batch = tuple(column[: sizes[-1]] for column in its_batch)
            _check(descents[-1], its_own, batch, [g[-1] for g in grads])
        optimizer.step(grads)
        for name, record in records.items():
            for k, (descent, n) in enumerate(zip(descents, sizes, strict=True)):
                kept = record[k, :n] if record.ndim > 1 else record[k]
                descent.recorded.setdefault(name, []).append(kept.flatten().clone())
        return losses


class Impure(ValueError):
    """A term reads more than it is given."""


def _check(
    descent: Descent,
    own: list[Prepared],
    batch: tuple[Tensor, ...],
    found: list[Tensor],
) -> None:
    """Compare the first gradient of a client with what its own terms say.

    All clients of a group use the terms of one of them.

    Raises:
        Impure: they read a tensor of this one that is not in its `own`.
    """
    with torch.enable_grad():
        losses, penalty, _ = descent.terms(descent.module, descent.params, own, batch)
        grads = derivative(losses, penalty, list(descent.params.values()))
    if descent.change is not None:
        descent.change(dict(zip(descent.params, grads, strict=True)), descent.params, own)
    descent.clipped(grads)
    exact, difference = (
        torch.stack(torch._foreach_norm(one)).norm()
        for one in (grads, torch._foreach_sub(grads, found))
    )
    if difference > CLOSE * exact + NOTHING:
        raise Impure("a term of one client reads a tensor that is not in its `own`")


# ---- forward passes
@dataclass
class Pass:
    """What one client asks for: what its model makes of x, in eval mode.

    Attributes:
        module: the model.
        x: (n, ...) its inputs.
        part: the method of the module that is called, such as "features" or "forward".
    """

    module: nn.Module
    x: Tensor
    part: str

    @cached_property
    def form(self) -> Hashable:
        """What such passes must have in common to be carried out as one."""
        x = self.x
        return stacks.layers(self.module), self.part, x.shape[1:], x.dtype, x.device

    @staticmethod
    @torch.no_grad()
    def perform(requests: Sequence[Pass]) -> list[Tensor]:
        """The outputs (n, ...) of each; those with more inputs go on without the others."""
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i].x))
        some = [requests[i] for i in order]
        module = Frozen(deepcopy(some[0].module))
        states = [one.module.state_dict() for one in some]
        values = {name: torch.stack([state[name] for state in states]) for name in states[0]}
        part = some[0].part

        def output(values: dict[str, Tensor], x: Tensor) -> Tensor:
            return getattr(module(values), part)(x)  # type: ignore[no-any-return]

        parts: list[list[Tensor]] = [[] for _ in some]
        for start in range(0, len(some[0].x), FORWARD_BATCH):
            batches = [one.x[start : start + FORWARD_BATCH] for one in some if len(one.x) > start]
            widths = [width(len(batch), FORWARD_BATCH) for batch in batches]
            for n in set(widths):
                first = widths.index(n)  # they are in order
                rows = slice(first, first + widths.count(n))
                x = torch.stack([padded(batch, n) for batch in batches[rows]])
                found = vmap(output)(at_rows(values, rows), x)
                for batch, its_parts, it in zip(batches[rows], parts[rows], found, strict=True):
                    its_parts.append(it[: len(batch)])
        outputs = [torch.cat(each) if len(each) > 1 else each[0] for each in parts]
        return [outputs[order.index(i)] for i in range(len(requests))]
