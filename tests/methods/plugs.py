"""Plug-ins and a task that the tests of several methods use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fedhet.core.client import FedClient
from fedhet.core.kernel import Phase, Plugin
from fedhet.core.messages import Broadcast, Update
from fedhet.core.task import Task
from fedhet.core.training import Batch
from fedhet.core.trees import AnyTree, Prepared, Tree
from fedhet.data.toy import toy_task


class Fixed(Plugin):
    """Gives client k the weight v[k] in place of the method's."""

    name = "fixed"
    needs_all = True

    def __init__(self, v: Sequence[float]) -> None:
        super().__init__()
        self.v = v

    def incoming(self, updates: Iterator[Update], old: Tree) -> list[Update]:
        weighted = list(updates)
        for update in weighted:
            update.weight = self.v[update.pid]
        return weighted


class Half(Plugin):
    """Halves every gradient, which is exact."""

    name = "half"

    def scale(self, grads: Tree, own: Prepared) -> None:
        torch._foreach_mul_(list(grads.values()), 0.5)


class Spy(Plugin):
    """Appends the positions of every forward pass in training to `seen`, by (step, client)."""

    name = "spy"

    def __init__(self, seen: dict[tuple[int, int], list[list[int]]]) -> None:
        super().__init__()
        self.seen = seen

    def losses(self, params: AnyTree, batch: Batch, own: Prepared) -> Tensor:
        self.seen[self.client.msg.step, self.client.pid].append(batch.index.tolist())
        return torch.zeros(len(batch.y))


class Explore(Plugin):
    """Has a phase of its own, in which every client trains from a fresh optimiser.

    The clients send the resulting weights as an extra; the server appends them to `ends`.
    """

    name = "explore"

    def __init__(self, ends: list[Any]) -> None:
        super().__init__()
        self.ends = ends

    def phases(self) -> list[Phase]:
        return [Phase("walk", 1, self.collect, check=self.look, cohort=1.0, uploads=False)]

    def look(self, update: Update) -> None:
        update.tree("explore.end")

    def walk(self, msg: Broadcast) -> Update:
        client: FedClient = self.client
        client.train_model(
            client.workspace.load(client.start(msg)), client.data, epochs=2, hooks=False
        )
        end = client.workspace.read(client.workspace.shared)
        return Update(client.pid, client.num_examples, extras={"explore.end": end})

    def collect(self, updates: Iterator[Update], old: Tree) -> Tree:
        self.ends.extend(update.extras["explore.end"] for update in updates)
        return {}


def noisy() -> Task:
    """A toy task with batch norm, whose statistics a side loop must not move, and with dropout.

    Dropout draws from the message's random stream, which a side loop must not move either.
    """

    def model() -> nn.Module:
        toy = toy_task(norm=True).model()
        toy.body.append(nn.Dropout(0.3))  # type: ignore[union-attr, operator]
        return toy

    return replace(toy_task(), model=model)
