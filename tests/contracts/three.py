"""A method with three kinds of phases, for the tests of phases.

`explore`: every client sends how far one epoch takes each weight; the model stays. `density`: a
second slot moves half way to the mean of the data until it no longer moves; its last step puts an
earlier value back. `train`: gradients are masked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fedhet.core import trees
from fedhet.core.client.context import ClientContext
from fedhet.core.kernel import (
    Client,
    Expected,
    Merged,
    Message,
    Method,
    Phase,
    Result,
    State,
    Step,
    Term,
    Update,
    serves,
)
from fedhet.core.messages import Extras
from fedhet.core.server.run_setup import RunSetup
from fedhet.core.trees import AnyTree, Tree

TOLERANCE = 0.02
STEPS = 20  # of `density` at most


def mask(params: AnyTree, batch: None, own: Tree) -> Tree:
    return own


class ThreeClient(Client):
    @serves
    def explore(self, msg: Message, state: State, ctx: ClientContext) -> tuple[Result, State]:
        assert msg["step"] == msg.step
        fitted = ctx.fit(msg.weights, epochs=1)
        change = trees.Difference(trees.pick(fitted.params, ctx.workspace.trained), msg.weights)
        return Result(extras={"far": trees.map(lambda d: d.square().float(), change)}), state

    @serves
    def density(self, msg: Message, state: State, ctx: ClientContext) -> tuple[Result, State]:
        mean = msg.weights["mean"]
        moved = {
            "mean": mean + (ctx.data.x.double().mean(0) - mean) / 2,
            "seen": msg.weights["seen"] + msg.pid,
        }
        return Result(moved), state

    def terms(self, msg: Message, state: State, ctx: ClientContext) -> list[Term]:
        return [Term("scale", mask, msg["mask"])]


@dataclass(frozen=True, kw_only=True)
class Three(Method):
    """Its state: "far", by client; "path", the values of the slot's mean; "ended", the rounds after
    which `density` ended."""

    name = "three"
    client = ThreeClient

    def setup(self, setup: RunSetup) -> State:
        return {"far": {}, "path": [], "ended": []}

    def slots(self, setup: RunSetup) -> dict[str, Tree]:
        return {"density": {"mean": torch.zeros(4, dtype=torch.float64), "seen": torch.tensor(0)}}

    def phases(self, setup: RunSetup) -> list[Phase]:
        explore = Phase("explore", 1, self._remember, cohort=1.0, uploads=False)
        density = Phase("density", STEPS, self._walk, slot="density", cohort=1.0, until=self._still)
        return [explore, density, *super().phases(setup)]

    def broadcast(self, step: Step, state: State) -> Extras:
        if step.phase == "explore":
            return {"step": step.number}
        if step.phase != "train":
            return {}
        mean = trees.mean((far, 1.0) for far in state["far"].values())
        return {"mask": trees.map(lambda d: (d > d.median()).float(), mean)}

    def expects(self, step: Step) -> dict[str, Expected]:
        return {"far": Expected(like=step.workspace.initial)} if step.phase == "explore" else {}

    def _remember(self, step: Step, state: State, old: Tree, updates: Iterator[Update]) -> Merged:
        return Merged({}, {**state, "far": {update.pid: update["far"] for update in updates}})

    def _walk(self, step: Step, state: State, old: Tree, updates: Iterator[Update]) -> Merged:
        merged = self.merge(step, state, old, updates)
        state = {**state, "path": [*state["path"], merged.weights["mean"]]}
        if not self._still(state) and step.number < STEPS:
            return merged._replace(state=state)
        state["ended"] = [*state["ended"], step.round]
        return Merged({"mean": state["path"][1]}, state)

    def _still(self, state: State) -> bool:
        path = state["path"]
        return len(path) > 1 and float((path[-1] - path[-2]).abs().max()) < TOLERANCE
