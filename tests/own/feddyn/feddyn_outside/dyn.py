"""FedDyn: a linear and a quadratic term make the clients' optima agree (Acar et al. 2021).

The paper is "Federated learning based on dynamic regularization"; this is its algorithm 1, with m
clients and the participants P.

    client: w_k = argmin_w L_k(w) - <g_k, w> + alpha/2 |w - x|^2,  in epochs of SGD
            g_k <- g_k - alpha (w_k - x)
    server: h <- h - alpha/m sum_{k in P} (w_k - x)
            x <- 1/|P| sum_{k in P} w_k - h/alpha

    down:          x, `feddyn.alpha`
    up:            w_k
    client keeps:  g_k, which is 0 before its first participation
    server keeps:  x, h

alpha = 0 is FedAvg with equal weights: h is 0 then, and h/alpha is taken as 0.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fedhet.core import check, trees
from fedhet.core.client import FedClient
from fedhet.core.messages import Broadcast, Extras, Update
from fedhet.core.phases import Phase
from fedhet.core.setting import Setting
from fedhet.core.strategy import FedStrategy
from fedhet.core.trees import Tree

ALPHA = "feddyn.alpha"  # extra down
GRADIENT = "feddyn.g"  # the client's state: g_k


class FedDynClient(FedClient):
    """Trains on the gradient of L_k minus g_k, plus alpha (w - x)."""

    _alpha = 0.0  # set in `train`, like the next two
    _received: Tree
    _g: Tree

    def train(self, msg: Broadcast) -> Update:
        self._alpha = msg.scalar(ALPHA)
        self._received = trees.pick(msg.weights, self.site.trained)
        self._g = self.state.get(GRADIENT) or trees.map(torch.zeros_like, self._received)
        update = super().train(msg)
        if self._alpha:
            moved = trees.Difference(trees.pick(update.weights, self._g), self._received)
            self.state.put(GRADIENT, trees.cast(trees.add(self._g, moved, -self._alpha), self._g))
        return update

    def gradient(self, grads: list[Tensor]) -> None:
        if self._alpha:
            site = self.site
            for grad, w, name in zip(grads, site.parameters, site.trained, strict=True):
                grad.sub_(self._g[name]).add_(w - self._received[name], alpha=self._alpha)


class FedDyn(FedStrategy):
    """The mean of the weights, corrected by the accumulated drift h."""

    name = "feddyn"
    client_cls = FedDynClient
    memory = ("h",)

    def __init__(self, setting: Setting, *, alpha: float = 0.1) -> None:
        self.alpha = check.number("method.alpha", alpha, low=0)
        super().__init__(setting)

    def setup(self) -> None:
        self.h = trees.zeros(trees.pick(self.site.initial, self.site.mergeable))

    def base_weight(self, update: Update) -> float:
        return 1.0

    def cohort_extras(self, phase: Phase, step: int, cohort: list[int]) -> Extras:
        return {ALPHA: self.alpha}

    def merge(self, updates: Iterator[Update], old: Tree) -> Tree:
        moved = trees.Sum()
        for update in updates:
            moved.add(update.change, update.weight)
        mean = moved.mean()
        if self.alpha:
            self.h = trees.add(self.h, moved.tree, -self.alpha / len(self.sizes))
            mean = trees.add(mean, self.h, -1 / self.alpha)
        return trees.add(mean, old)
