"""DynReg: a linear and a quadratic term make the clients' optima agree (Acar et al. 2021).

The paper is "Federated learning based on dynamic regularization"; this is its algorithm 1, with m
clients and the participants P.

    client: w_k = argmin_w L_k(w) - <g_k, w> + alpha/2 |w - x|^2,  in epochs of SGD
            g_k <- g_k - alpha (w_k - x)
    server: h <- h - alpha/m sum_{k in P} (w_k - x)
            x <- 1/|P| sum_{k in P} w_k - h/alpha

    down:          x, `dynreg.alpha`
    up:            w_k
    client keeps:  g_k, which is 0 before its first participation
    server keeps:  x, h

alpha = 0 is FedAvg with equal weights: h is 0 then, and h/alpha is taken as 0.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fedhet.core import check, trees
from fedhet.core.client import FedClient
from fedhet.core.kernel import Phase
from fedhet.core.messages import Broadcast, Extras, Update
from fedhet.core.setting import Setting
from fedhet.core.strategy import FedStrategy
from fedhet.core.trees import AnyTree, Prepared, Tree

ALPHA = "dynreg.alpha"  # extra down
GRADIENT = "dynreg.g"  # the client's state: g_k


class DynRegClient(FedClient):
    """Trains on the gradient of L_k minus g_k, plus alpha (w - x)."""

    def train(self, msg: Broadcast) -> Update:
        update = super().train(msg)
        if alpha := msg.scalar(ALPHA):
            own = self.prepare(msg)
            moved = trees.Difference(trees.pick(update.weights, own["g"]), own["x"])
            self.state.put(GRADIENT, trees.cast(trees.add(own["g"], moved, -alpha), own["g"]))
        return update

    def prepare(self, msg: Broadcast) -> Prepared:
        x = trees.pick(msg.weights, self.workspace.mergeable)
        return {"x": x, "g": self.state.get(GRADIENT) or trees.map(torch.zeros_like, x)}

    def gradient(self, grads: Tree, params: AnyTree, own: Prepared) -> None:
        if own and (alpha := self.msg.scalar(ALPHA)):
            for name, g in own["g"].items():  # what is trained and not shared has no term
                grads[name].sub_(g).add_(params[name] - own["x"][name], alpha=alpha)


class DynReg(FedStrategy):
    """The mean of the weights, corrected by the accumulated drift h."""

    name = "dynreg"
    client_cls = DynRegClient
    memory = ("h",)

    def __init__(self, setting: Setting, *, alpha: float = 0.1) -> None:
        self.alpha = check.number("method.alpha", alpha, low=0)
        super().__init__(setting)

    def setup(self) -> None:
        self.h = trees.zeros(trees.pick(self.workspace.initial, self.workspace.mergeable))

    def base_weight(self, update: Update) -> float:
        return 1.0

    def cohort_extras(self, phase: Phase, step: int, cohort: list[int]) -> Extras:
        return {ALPHA: self.alpha}

    def merge(self, updates: Iterator[Update], old: Tree) -> Tree:
        moved = trees.Sum()  # under the weights, which plug-ins may set and scale
        drifted = trees.Sum()  # the sum of line h, which has none
        for update in updates:
            moved.add(update.change, update.weight)
            drifted.add(update.change, 1.0)
        mean = moved.mean()
        if self.alpha:
            self.h = trees.add(self.h, drifted.tree, -self.alpha / len(self.sizes))
            mean = trees.add(mean, self.h, -1 / self.alpha)
        return trees.add(mean, old)
