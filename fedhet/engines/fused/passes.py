"""Forward passes of several models as one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import vmap

from fedhet.core.client.functional import Frozen
from fedhet.core.metrics import FORWARD_BATCH
from fedhet.engines.fused import stacks
from fedhet.engines.fused.stacks import at_rows
from fedhet.engines.fused.steps import padded, width


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
