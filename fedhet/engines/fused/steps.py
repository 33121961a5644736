"""Gradient steps and forward passes of several models in one batch (fused)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from fedhet.core.client.descent import Descent
from fedhet.core.client.functional import Frozen
from fedhet.core.client.optimizers import derivative, gradients
from fedhet.core.trees import Prepared, Tree
from fedhet.engines.fused import stacks
from fedhet.engines.fused.stacks import at_rows, mapped, put_back, put_rows, stack, tensors
from fedhet.engines.fused.traces import traces_of

# Tolerances of the check of a gradient. Errors of bfloat16 stay within the relative tolerance;
# errors of a term with wrong tensors do not. Gradients below the absolute tolerance are only
# rounding errors, for example the gradient of a constant loss.
RELATIVE_TOLERANCE = 0.02
ABSOLUTE_TOLERANCE = 1e-5
LEAST_WIDTH = 64  # a batch padded to this width takes hardly longer than a smaller batch
State = tuple[Tree, Tree, list[Prepared], Any]  # parameters, other parameters, own, optimiser


@dataclass
class Training:
    """One client's request to train its model for some epochs.

    Attributes:
        descent: the model, the loss and the optimiser.
        orders: the order of the samples in each epoch.
        alone: whether the request must be computed without other requests.
    """

    descent: Descent
    orders: list[Tensor]
    alone: bool = False

    @property
    def form(self) -> Hashable:
        """The key that trainings must share to be computed in one batch."""
        return self.kind, id(self) if self.alone else None

    @cached_property
    def kind(self) -> Hashable:
        """A key. If trainings have equal keys, the hooks of one of them work for all of them."""
        d = self.descent
        columns = tuple((c.shape[1:], c.dtype, c.device) for c in d.columns)
        layers = None if d.module is None else (stacks.layers(d.module), d.module.training)
        flags = tuple(hook is None for hook in (d.change, d.draw, d.augment))
        return d.common, d.size, d.clip, columns, layers, stacks.form(self.state), flags

    @cached_property
    def state(self) -> State:
        """All tensors that a step reads or changes, except the samples."""
        d = self.descent
        trained = {id(p) for p in d.params.values()}
        named = () if d.module is None else d.module.named_parameters()
        return d.params, {k: p for k, p in named if id(p) not in trained}, d.own, d.optimizer

    @staticmethod
    @torch.no_grad()
    def perform(requests: Sequence[Training]) -> list[Tensor]:
        """Take all steps, and return for each training the sum of the losses in its last epoch.

        All trainings take their first step together. A training that has no batches left drops out,
        and the others continue.
        """
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i].lengths))
        trainings = [requests[i] for i in order]
        batches = StackedBatches(trainings)
        lengths, device = batches.lengths, batches.device
        widths = [training.width for training in trainings]
        step = StackedStep(trainings[0].descent, trainings[0].kind)
        exact = step.like.exact
        stacked = stack([training.state for training in trainings])
        # `stack` creates the tensors of learning rates on the CPU, so move them to the device.
        every: State = mapped(lambda t: t.to(device, non_blocking=True), stacked)
        state, rows = every, len(trainings)
        totals = torch.zeros(rows, dtype=torch.float64, device=device)
        for t in range(len(lengths[0])):
            going = sum(len(own) > t for own in lengths[:rows])
            if going < rows:
                # Views of `every`, which keeps the final states of the rows that have dropped out.
                state, rows = at_rows(state, slice(0, going)), going
            parts = _parts([own[t] for own in lengths[:rows]] if exact else widths[:rows], device)
            for part, chosen, width_ in parts:
                # Each part has its own stack, and its own optimiser, which counts steps.
                part_state = state if len(parts) == 1 else at_rows(state, chosen)
                sizes, group = [lengths[row][t] for row in part], [trainings[row] for row in part]
                columns, weights = batches.at(t, part, chosen, sizes, width_)
                check = t == 0 and group[-1] is not trainings[0] and not step.traces.checked
                losses = step(part_state, columns, weights, group, sizes, check=check)
                step.traces.checked |= check
                totals[chosen] += losses * batches.counts[chosen, t]
                if part_state is not state:
                    put_rows((part_state[0], part_state[3]), chosen, (state[0], state[3]))
        moves: list[tuple[Tensor, Tensor]] = []
        for row, training in enumerate(trainings):
            own = training.descent.params, training.descent.optimizer
            put_back((every[0], every[3]), row, own, len(training.lengths), moves)
        torch._foreach_copy_([into for into, _ in moves], [row for _, row in moves])
        return [totals[order.index(i)] for i in range(len(requests))]

    @cached_property
    def lengths(self) -> list[int]:
        """The number of samples in each batch."""
        size = self.descent.size
        parts = (divmod(len(order), size) for order in self.orders)
        return [n for whole, rest in parts for n in [size] * whole + [rest] * bool(rest)]

    @cached_property
    def width(self) -> int:
        """The number of rows in each batch after padding."""
        return width(max(map(len, self.orders)), self.descent.size)

    def positions(self) -> Tensor:
        """Return the positions of each batch's samples (steps, size); unused places are 0."""
        size = self.descent.size
        padded = [functional.pad(order, (0, -len(order) % size)) for order in self.orders]
        return torch.cat([order.view(-1, size) for order in padded])


def width(n: int, most: int) -> int:
    """Return the number of rows for n samples, so that several clients' tensors have one shape.

    The result depends only on the arguments. With other shapes, matrices are multiplied in another
    order; a client's bytes would then depend on the clients that are trained with it.
    """
    return min(most, max(LEAST_WIDTH, 1 << (n - 1).bit_length()))


def _samples(descent: Descent) -> Hashable:
    """Return a key for a descent's samples: the ids of their tensors.

    The positions (column 1) do not count, because every descent makes a new tensor of them.
    """
    x, *others = descent.columns
    return id(x), *(id(t) for i, t in enumerate(others) if i != 1)


class StackedBatches:
    """The batches of several trainings, the longest first.

    Attributes:
        lengths: for each training, the number of samples in each of its batches.
        counts: (K, steps), float64: the number of samples in each batch of a training's last epoch;
            0 for batches of earlier epochs.
    """

    def __init__(self, trainings: Sequence[Training]) -> None:
        self.lengths = [training.lengths for training in trainings]
        self._descents = [training.descent for training in trainings]
        # Several trainings may have the same samples.
        different = {_samples(descent): descent.columns for descent in self._descents}
        sizes = [len(x) for x, *_ in different.values()]
        offsets = dict(zip(different, accumulate(sizes, initial=0), strict=False))
        self._columns = [torch.cat(parts) for parts in zip(*different.values(), strict=True)]
        self.device = self._columns[0].device
        width = max(each.width for each in trainings)
        index = [
            each.positions()[:, :width] + offsets[_samples(each.descent)] for each in trainings
        ]
        lengths = pad_sequence([torch.tensor(own) for own in self.lengths], batch_first=True)
        counts = lengths.double()
        for row, (each, own) in enumerate(zip(trainings, self.lengths, strict=True)):
            counts[row, : len(own) - -(-len(each.orders[-1]) // each.descent.size)] = 0
        # Copy each tensor to the accelerator once, and not once per step.
        self._index = pad_sequence(index, batch_first=True).to(self.device, non_blocking=True)
        self.counts = counts.to(self.device, non_blocking=True)
        lengths = lengths.float().to(self.device, non_blocking=True)[..., None]
        self._weights = (torch.arange(width, device=self.device) < lengths) / lengths.clamp(min=1)

    def at(
        self, t: int, rows: list[int], chosen: slice | Tensor, sizes: list[int], width: int
    ) -> tuple[list[Tensor], Tensor]:
        """Return the columns of the t-th batches (K, B, ...), and their losses' weights (K, B).

        Args:
            t: the number of the batches.
            rows: the rows of the trainings.
            chosen: the same rows as an index.
            sizes: the numbers of samples in the batches.
            width: the batches are padded to this width, with samples of weight 0.
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


# The rows that take a step together, the same rows as an index, and the width of their batches.
Part = tuple[list[int], Any, int]


def _parts(widths: list[int], device: torch.device) -> list[Part]:
    """Split a step into parts, so that all batches of a part have the same width."""
    different = sorted({*widths})
    if len(different) == 1:
        return [(list(range(len(widths))), slice(len(widths)), widths[0])]
    parts = [[row for row, own in enumerate(widths) if own == n] for n in different]
    every = zip(parts, different, strict=True)
    return [(rows, torch.tensor(rows, device=device), n) for rows, n in every]


class StackedStep:
    """A gradient step of several models. Their trainings have equal `kind`.

    Args:
        like: one of the descents.
        kind: the `kind` of their trainings.
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
            state: the stacked states of the trainings.
            columns: the batches.
            weights: the weights of the samples' losses.
            trainings: the trainings, in the order of the state's rows.
            sizes: the numbers of samples in their batches.
            check: whether to compute the last training's gradient also by its own hooks, and to
                compare the two gradients.
        """
        params, fixed, own, optimizer = state
        descents = [training.descent for training in trainings]
        if descents[0].draw is not None:
            draws = [d.draw(n) for d, n in zip(descents, sizes, strict=True)]  # type: ignore[misc]
            # One copy of each draw to an accelerator, for all clients.
            drawn = mapped(lambda t: t.to(weights.device, non_blocking=True), stack(draws))
            own = [a | b for a, b in zip(own, drawn, strict=True)]
        read = tensors((fixed, own))

        def batch_loss(*given: Tensor) -> tuple[Tensor, Tree]:
            parts = iter(given)
            values = dict(zip(params, parts, strict=False))
            at = dict(zip(map(id, read), parts, strict=False))
            others, row_own = mapped(lambda t: at[id(t)], (fixed, own))
            module = None
            if self._module is not None:
                module = self._module(
                    {k: values[name] if name else others[k] for k, name in self._names.items()}
                )
            *batch, weights = parts
            losses, penalty, records = self.like.terms(module, values, row_own, tuple(batch))
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
            last_own, *last = (mapped(lambda t: t[-1], value) for value in (own, *columns))
            batch = tuple(column[: sizes[-1]] for column in last)
            _check(descents[-1], last_own, batch, [g[-1] for g in grads])
        optimizer.step(grads)
        for name, record in records.items():
            for k, (descent, n) in enumerate(zip(descents, sizes, strict=True)):
                kept = record[k, :n] if record.ndim > 1 else record[k]
                descent.recorded.setdefault(name, []).append(kept.flatten().clone())
        return losses


class Impure(ValueError):
    """A term reads tensors other than its arguments."""


def _check(
    descent: Descent,
    own: list[Prepared],
    batch: tuple[Tensor, ...],
    found: list[Tensor],
) -> None:
    """Compute a client's first gradient with its own terms, and compare it with `found`.

    In a batch, the gradients of all clients are computed with the terms of one client.

    Args:
        descent: the client's model and terms.
        own: the client's tensors for the terms.
        batch: the client's first batch.
        found: the client's gradient from the batch of all clients.

    Raises:
        Impure: the gradients differ, so a term reads a client's tensor that is not in its `own`.
    """
    with torch.enable_grad():
        losses, penalty, _ = descent.terms(descent.module, descent.params, own, batch)
        grads = derivative(losses, penalty, list(descent.params.values()))
    if descent.change is not None:
        descent.change(dict(zip(descent.params, grads, strict=True)), descent.params, own)
    descent.clipped(grads)
    exact, difference = (
        torch.stack(torch._foreach_norm(each)).norm()
        for each in (grads, torch._foreach_sub(grads, found))
    )
    if difference > RELATIVE_TOLERANCE * exact + ABSOLUTE_TOLERANCE:
        raise Impure("a term of one client reads a tensor that is not in its `own`")
