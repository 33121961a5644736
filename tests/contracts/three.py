"""A strategy with three kinds of phases, and plug-ins with phases, for the tests of phases.

`explore`: every client sends how far one epoch takes each weight; the model stays. `density`: a
second slot moves half way to the mean of the data until it no longer moves; afterwards an earlier
value is restored. `train`: gradients are masked.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fedhet.core import trees
from fedhet.core.client import FedClient
from fedhet.core.messages import Broadcast, Extras, Update
from fedhet.core.phases import Phase
from fedhet.core.setting import Setting
from fedhet.core.strategy import FedStrategy
from fedhet.core.trees import AnyTree, Prepared, Tree

TOLERANCE = 0.02


class ThreeClient(FedClient):
    def explore(self, msg: Broadcast) -> Update:
        assert msg.extras["three.pid"] == self.pid
        self.train_model(self.workspace.load(self.start(msg)), self.data, epochs=1)
        change = trees.Difference(self.workspace.read(self.workspace.trained), msg.weights)
        far = trees.map(lambda d: d.square().float(), change)
        return Update(self.pid, self.num_examples, extras={"three.far": far})

    def density(self, msg: Broadcast) -> Update:
        mean = msg.weights["mean"]
        moved = {
            "mean": mean + (self.data.x.double().mean(0) - mean) / 2,
            "seen": msg.weights["seen"] + self.pid,
        }
        return Update(self.pid, self.num_examples, moved)

    def prepare(self, msg: Broadcast) -> Tree:
        return msg.tree("three.mask")

    def gradient(self, grads: Tree, params: AnyTree, own: Prepared) -> None:
        if own:
            torch._foreach_mul_(*trees.columns(grads, grads, own))


class Three(FedStrategy):
    name = "three"
    client_cls = ThreeClient

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.far: dict[int, Tree] = {}
        self.path: list[Tensor] = []  # the values of the slot's mean
        self.ended: list[int] = []  # the rounds after which `density` ended

    def slots(self) -> dict[str, Tree]:
        return {"density": {"mean": torch.zeros(4, dtype=torch.float64), "seen": torch.tensor(0)}}

    def look(self, update: Update) -> None:
        update.tree("three.far", self.workspace.initial)

    def phases(self) -> list[Phase]:
        explore = Phase("explore", 1, self.remember, check=self.look, cohort=1.0, uploads=False)
        density = Phase(
            "density",
            20,
            self.walk,
            slot="density",
            cohort=1.0,
            until=self.still,
            after=self.restore,
        )
        return [explore, density, *super().phases()]

    def client_extras(self, phase: Phase, pid: int) -> Extras:
        return {"three.pid": pid} if phase.name == "explore" else {}

    def cohort_extras(self, phase: Phase, step: int, cohort: list[int]) -> Extras:
        if phase.name != "train":
            return {}
        mean = trees.mean((far, 1.0) for far in self.far.values())
        return {"three.mask": trees.map(lambda d: (d > d.median()).float(), mean)}

    def remember(self, updates: Iterator[Update], old: Tree) -> Tree:
        self.far = {
            update.pid: update.tree("three.far", self.workspace.initial) for update in updates
        }
        return {}

    def walk(self, updates: Iterator[Update], old: Tree) -> Tree:
        new = self.merge(updates, old)
        self.path.append(new["mean"])
        return new

    def still(self) -> bool:
        if len(self.path) < 2:
            return False
        return float((self.path[-1] - self.path[-2]).abs().max()) < TOLERANCE

    def restore(self) -> None:
        self.ended.append(self.current.round)
        self.weights["density"] = {**self.weights["density"], "mean": self.path[1]}
