"""Gradient steps of several models as one."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional

from fedhet.core.descent import Descent
from fedhet.core.functional import Frozen
from fedhet.core.optimizers import gradients
from fedhet.fused.stacks import form, mapped, put_back, stack


@dataclass
class Training:
    """What one client asks for: the steps of epochs with these orders of its samples."""

    descent: Descent
    orders: list[Tensor]

    def form(self) -> Hashable:
        """What such trainings must have in common to be carried out as one."""
        d = self.descent
        columns = [(c.shape[1:], c.dtype, c.device) for c in d.columns]
        layers = None if d.module is None else (repr(d.module), d.module.training)
        trees = form((d.params, others(d), d.own, d.optimizer))
        flags = tuple(one is None for one in (d.change, d.draw, d.augment))
        return d.common, d.size, tuple(columns), layers, trees, flags


def others(descent: Descent) -> dict[str, Tensor]:
    """The parameters of the module that are not trained, by name."""
    if descent.module is None:
        return {}
    own = {id(p) for p in descent.params.values()}
    return {name: p for name, p in descent.module.named_parameters() if id(p) not in own}


@torch.no_grad()
def train(asked: Sequence[Training]) -> list[Tensor]:
    """Take all steps, and return for each training the sum of the losses in its last epoch.

    All take their first step together; those with more batches go on without the others.
    """
    plans = [Plan.of(one) for one in asked]
    by_length = sorted(range(len(asked)), key=lambda i: -len(plans[i].lengths))
    return_to = {i: row for row, i in enumerate(by_length)}
    members = [asked[i].descent for i in by_length]
    plans = [plans[i] for i in by_length]
    first = members[0]
    seen: dict[Hashable, Tensor] = {}
    columns, offsets = _joined(members)
    device = columns[0].device
    steps, width = len(plans[0].lengths), max(max(plan.lengths) for plan in plans)
    lengths = torch.zeros(len(plans), steps, dtype=torch.int64)
    index = torch.zeros(len(plans), steps, width, dtype=torch.int64)
    for row, plan in enumerate(plans):
        lengths[row, : len(plan.lengths)] = torch.tensor(plan.lengths)
        index[row, : len(plan.lengths)] = plan.index[:, :width] + offsets[row]
    inside = torch.arange(width) < lengths[..., None]
    index = torch.where(inside, index, torch.tensor(offsets)[:, None, None])
    index, inside = index.to(device), inside.to(device)
    weights = inside / lengths[..., None].clamp(min=1).to(device)
    state = stack([(m.params, others(m), m.own, m.optimizer) for m in members], seen)
    step = Step(first)
    totals = torch.zeros(len(plans), dtype=torch.float64, device=device)
    ...
