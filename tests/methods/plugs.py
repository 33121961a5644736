"""What tests of methods share: plug-ins, and a task whose model is hard to leave alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedhet.data.toy import toy_task
from fedhet.messages import Update
from fedhet.plugin import Plugin
from fedhet.task import Task
from fedhet.trees import Tree


class Fixed(Plugin):
    """Client k's weight is v[k], whatever the host's."""

    name = "fixed"
    needs_all = True

    def __init__(self, v: Sequence[float]) -> None:
        super().__init__()
        self.v = v

    def incoming(self, updates: Iterator[Update], old: Tree) -> list[Update]:
        out = list(updates)
        for update in out:
            update.weight = self.v[update.pid]
        return out


class Half(Plugin):
    """Halves every gradient, which is exact."""

    name = "half"

    def scale(self, grads: list[Tensor]) -> None:
        torch._foreach_mul_(grads, 0.5)


def noisy() -> Task:
    """Batch norm, whose statistics a side loop must not move, and dropout, which draws from the
    message's random stream."""

    def model() -> nn.Module:
        made = toy_task(norm=True).model()
        made.body.append(nn.Dropout(0.3))  # type: ignore[union-attr, operator]
        return made

    return replace(toy_task(), model=model)
