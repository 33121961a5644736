"""Gradient steps of several models as one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional

from fedhet.core.descent import Descent
from fedhet.core.functional import Frozen
from fedhet.core.optimizers import gradients
from fedhet.core.trees import Prepared, Tree
from fedhet.fused.stacks import form, mapped, put_back, stack

State = tuple[Tree, Tree, list[Prepared], Any]  # parameters, other parameters, own, optimiser


@dataclass
class Training:
    """What one client asks for: the steps of epochs with these orders of its samples."""

    descent: Descent
    orders: list[Tensor]

    @property
    def form(self) -> Hashable:
        """What such trainings must have in common to be carried out as one."""
        d = self.descent
        columns = tuple((c.shape[1:], c.dtype, c.device) for c in d.columns)
        layers = None if d.module is None else (repr(d.module), d.module.training)
        flags = tuple(one is None for one in (d.change, d.draw, d.augment))
        return d.common, d.size, d.clip, columns, layers, form(self.state), flags

    @property
    def state(self) -> State:
        """All tensors that a step reads or changes, beside the samples."""
        d = self.descent
        trained = {id(p) for p in d.params.values()}
        named = () if d.module is None else d.module.named_parameters()
        return d.params, {k: p for k, p in named if id(p) not in trained}, d.own, d.optimizer

    @staticmethod
    def perform(requests: Sequence[Training]) -> list[Tensor]:
        return train(requests)

    @property
    def lengths(self) -> list[int]:
        """The number of samples in each batch."""
        size = self.descent.size
        parts = (divmod(len(order), size) for order in self.orders)
        return [n for whole, rest in parts for n in [size] * whole + [rest] * bool(rest)]

    def positions(self) -> Tensor:
        """(steps, size): those of each batch's samples, and 0 where a batch has fewer."""
        size = self.descent.size
        padded = [functional.pad(order, (0, -len(order) % size)) for order in self.orders]
        return torch.cat([order.view(-1, size) for order in padded])


def padded(t: Tensor, n: int) -> Tensor:
    """The tensor with n rows; those that it lacks are zeros."""
    return t if len(t) == n else torch.cat([t, t.new_zeros(n - len(t), *t.shape[1:])])


class Batches:
    """The batches of several trainings, the longest first.

    Attributes:
        lengths: of each training, the number of samples in each of its batches.
    """

    def __init__(self, trainings: Sequence[Training]) -> None:
        self.lengths = [one.lengths for one in trainings]
        self._descents = [one.descent for one in trainings]
        offsets: dict[int, int] = {}  # the samples of several trainings may be the same
        different = []
        n = 0
        for descent in self._descents:
            if id(descent.columns[0]) not in offsets:
                offsets[id(descent.columns[0])] = n
                different.append(descent.columns)
                n += len(descent.columns[0])
        self._columns = [torch.cat(parts) for parts in zip(*different, strict=True)]
        self.device = self._columns[0].device
        width = max(map(max, self.lengths))
        shape = len(trainings), len(self.lengths[0]), width
        index = torch.zeros(shape, dtype=torch.int64, device=self.device)
        lengths = torch.zeros(shape[:2], device=self.device)
        for row, (one, own) in enumerate(zip(trainings, self.lengths, strict=True)):
            index[row, : len(own)] = one.positions()[:, :width]
            index[row] += offsets[id(one.descent.columns[0])]
            lengths[row, : len(own)] = torch.tensor(own, device=self.device)
        self._index = index
        inside = torch.arange(width, device=self.device) < lengths[..., None]
        self._weights = inside / lengths[..., None].clamp(min=1)

    def at(self, t: int, rows: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """The columns of the t-th batches (K, B, ...), and the weights of their losses (K, B).

        Args:
            t: which batches.
            rows: of which trainings. Batches with fewer samples than another one have some that
                they do not count.
        """
        width = max(self.lengths[row][t] for row in rows)
        whole = rows[-1] == len(rows) - 1
        chosen = slice(0, len(rows)) if whole else torch.tensor(rows, device=self.device)
        index = self._index[chosen, t, :width]
        flat = index.reshape(-1)
        columns = [
            column.index_select(0, flat).view(*index.shape, *column.shape[1:])
            for column in self._columns
        ]
        for k, row in enumerate(rows):
            if (augment := self._descents[row].augment) is not None:
                n = self.lengths[row][t]
                columns[0][k, :n] = augment(columns[0][k, :n])
        return columns, self._weights[chosen, t, :width]


@torch.no_grad()
def train(asked: Sequence[Training]) -> list[Tensor]:
    """Take all steps, and return for each training the sum of the losses in its last epoch.

    All take their first step together; those with more batches go on without the others.
    """
    order = sorted(range(len(asked)), key=lambda i: -len(asked[i].lengths))
    trainings = [asked[i] for i in order]
    batches = Batches(trainings)
    lengths = batches.lengths
    ends = [
        len(own) - -(-len(one.orders[-1]) // one.descent.size)
        for one, own in zip(trainings, lengths, strict=True)
    ]
    step = Step(trainings[0].descent)
    state: State = stack([one.state for one in trainings], {})
    totals = torch.zeros(len(trainings), dtype=torch.float64, device=batches.device)
    rows = len(trainings)
    for t in range(len(lengths[0])):
        going = sum(len(own) > t for own in lengths)
        if going < rows:
            _finish(state, trainings[going:rows], going)
            state, rows = mapped(lambda one: one[:going], state), going  # noqa: B023
        for part in _parts([own[t] for own in lengths[:rows]], step.exact):
            seen: dict[int, Tensor] = {}
            chosen = torch.tensor(part, device=batches.device)
            some = state if len(part) == rows else mapped(lambda one: one[chosen], state, seen)  # noqa: B023
            columns, weights = batches.at(t, part)
            descents = [trainings[row].descent for row in part]
            sizes = [lengths[row][t] for row in part]
            values = step(some, columns, weights, descents, sizes)
            if seen:
                mapped(lambda one: one.index_copy_(0, chosen, seen[id(one)]), (state[0], state[3]))  # noqa: B023
            last = torch.tensor([t >= ends[row] for row in part], device=batches.device)
            totals[chosen] += values.double() * torch.tensor(sizes, device=batches.device) * last
    _finish(state, trainings[:rows], 0)
    row_of = {i: row for row, i in enumerate(order)}
    return [totals[row_of[i]] for i in range(len(asked))]


def _parts(sizes: list[int], exact: bool) -> list[list[int]]:
    """The rows that take a step at once: all, or those whose batches are of one size."""
    if not exact:
        return [list(range(len(sizes)))]
    by_size = sorted(range(len(sizes)), key=lambda row: (sizes[row], row))
    return [list(part) for _, part in groupby(by_size, lambda row: sizes[row])]


def _finish(state: State, trainings: Sequence[Training], first: int) -> None:
    for row, one in enumerate(trainings, first):
        params, _, _, optimizer = state
        put_back(params, row, one.descent.params)
        put_back(optimizer, row, one.descent.optimizer)


class Step:
    """A gradient step of several models, whose descents have one form.

    Args:
        like: one of them.
    """

    def __init__(self, like: Descent) -> None:
        self._terms = like.terms
        self._change = like.change
        self._clipped = like.clipped
        self.exact = like.exact
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
        descents: list[Descent],
        sizes: list[int],
    ) -> Tensor:
        """Take the step, and return the batch losses (K,)."""
        params, fixed, own, optimizer = state
        if descents[0].draw is not None:
            draws = [d.draw(n) for d, n in zip(descents, sizes, strict=True)]  # type: ignore[misc]
            own = [a | b for a, b in zip(own, stack(draws, {}), strict=True)]
        read: dict[int, Tensor] = {}
        mapped(lambda t: t, (fixed, own), read)

        def batch_loss(
            values: list[Tensor], inner: list[Tensor], columns: list[Tensor], weights: Tensor
        ) -> tuple[Tensor, Tree]:
            given = dict(zip(params, values, strict=True))
            at = dict(zip(read, inner, strict=True))
            others, its_own = mapped(lambda t: at[id(t)], (fixed, own))
            module = None
            if self._module is not None:
                module = self._module(
                    {k: given[name] if name else others[k] for k, name in self._names.items()}
                )
            losses, penalty, records = self._terms(module, given, its_own, tuple(columns))
            total = (losses * weights).sum()
            return total if penalty is None else total + penalty, records

        with torch.enable_grad():
            leaves = [p.detach().requires_grad_() for p in params.values()]
            losses, records = vmap(batch_loss)(leaves, list(read.values()), columns, weights)
            grads = gradients([losses], [torch.ones_like(losses)], leaves)
        if self._change is not None:
            self._change(dict(zip(params, grads, strict=True)), params, own)
        self._clipped(grads, rows=True)
        optimizer.step(grads)
        for name, record in records.items():
            for k, (descent, n) in enumerate(zip(descents, sizes, strict=True)):
                kept = record[k].detach()[:n] if record.ndim > 1 else record[k].detach()
                descent.recorded.setdefault(name, []).append(kept.reshape(-1))
        return losses.detach()
