"""Plug-ins and a task that the tests of several methods use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedhet.core import trees
from fedhet.core.client.context import ClientContext
from fedhet.core.client.training import Batch
from fedhet.core.kernel import (
    Expected,
    Merged,
    Message,
    Phase,
    Plugin,
    Result,
    State,
    Step,
    Term,
    Update,
    serves,
)
from fedhet.core.server.run_setup import RunSetup
from fedhet.core.task import Task
from fedhet.core.trees import AnyTree, Prepared, Tree
from fedhet.data.toy import toy_task


@dataclass(frozen=True)
class Fixed(Plugin):
    """Gives client k the weight v[k] in place of the method's."""

    name = "fixed"
    needs = frozenset({"used weights"})

    v: Sequence[float]

    def weight(self, step: Step, state: State, update: Update) -> float:
        return self.v[update.pid]


@dataclass(frozen=True)
class Half(Plugin):
    """Halves every gradient, which is exact."""

    name = "half"
    breaks = {"plain steps": "it scales gradients"}

    def terms(self, msg: Message, state: State, ctx: ClientContext) -> list[Term]:
        return [Term("scale", halves)]


def halves(params: AnyTree, batch: None, own: Prepared) -> Tree:
    return {name: torch.full_like(p, 0.5) for name, p in params.items()}


@dataclass(frozen=True)
class Weighing(Plugin):
    """Weighs samples by their positions in the data, from 0 to 2."""

    name = "weighing"

    def terms(self, msg: Message, state: State, ctx: ClientContext) -> list[Term]:
        w = torch.linspace(0, 2, len(ctx.data), dtype=torch.float64)
        return [Term("weight", weights_of, {"w": w})]


def weights_of(params: AnyTree, batch: None, own: Any) -> Tensor:
    return own["w"]  # type: ignore[no-any-return]


def spy(seen: dict[tuple[int, int], list[list[int]]]) -> Plugin:
    """Appends the positions of every forward pass in training to `seen`, by (step, client)."""

    @dataclass(frozen=True)
    class Spy(Plugin):
        name = "spy"

        def terms(self, msg: Message, state: State, ctx: ClientContext) -> list[Term]:
            def look(params: AnyTree, batch: Batch, own: Prepared) -> Tensor:
                seen[msg.step, msg.pid].append(batch.index.tolist())
                return torch.zeros(len(batch.y))

            return [Term("loss", look)]

    return Spy()


def explore(ends: list[Any]) -> Plugin:
    """Has a phase of its own, in which every client trains from a fresh optimiser.

    The clients send the resulting weights as an extra; the server appends them to `ends`.
    """

    @dataclass(frozen=True)
    class Explore(Plugin):
        name = "explore"

        def phases(self, setup: RunSetup) -> list[Phase]:
            return [Phase("walk", 1, self._collect, cohort=1.0, uploads=False)]

        def expects(self, step: Step) -> dict[str, Expected]:
            return {"end": Expected(tree=True)} if step.phase == "walk" else {}

        @serves
        def walk(self, msg: Message, state: State, ctx: ClientContext) -> tuple[Result, State]:
            params = ctx.fit(msg.weights, epochs=2).params
            return Result(extras={"end": trees.pick(params, ctx.workspace.shared)}), state

        def _collect(
            self, step: Step, state: State, old: Tree, updates: Iterator[Update]
        ) -> Merged:
            ends.extend(update["end"] for update in updates)
            return Merged({}, state)

    return Explore()


def noisy() -> Task:
    """A toy task with batch norm, whose statistics a side loop must not move, and with dropout.

    Dropout draws from the message's random stream, which a side loop must not move either.
    """

    def model() -> nn.Module:
        toy = toy_task(norm=True).model()
        toy.body.append(nn.Dropout(0.3))  # type: ignore[union-attr, operator]
        return toy

    return replace(toy_task(), model=model)
