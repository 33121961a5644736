"""FedDyn: a linear and a quadratic term make the clients' optima agree (Acar et al. 2021).

The paper is "Federated learning based on dynamic regularization"; this is its algorithm 1, with m
clients and the participants P.

    client: w_k <- E epochs of local SGD on L_k(w) - <g_k, w> + alpha/2 |w - x|^2, from w = x
            g_k <- g_k - alpha (w_k - x)
    server: h <- h - alpha/m sum_{k in P} (w_k - x)
            x <- 1/|P| sum_{k in P} w_k - h/alpha

    down:          x, `feddyn.alpha`
    up:            w_k
    client keeps:  g_k, which is 0 before its first participation
    server keeps:  x, h

Where the clients solve their problems exactly, g_k is the gradient of L_k at w_k, and h is the mean
of the g_k. The model rests where h = 0: at the optimum of the plain mean of the L_k, whatever the
amount of local work. The means are those of the paper, without weights, so that plug-ins which
weigh clients are refused.

Deviations and choices:

- The paper minimises the local problem; here as there in the experiments, E epochs of SGD stand for
  that.
- The authors' code divides alpha by a client's share of the samples. The paper has one alpha for
  all clients, and so does this method.
- Terms, g_k and h cover the parameters that are trained and shared; buffers are averaged beside.

Default: `alpha = 0.1`, the largest of the paper's values (`0.1`, `0.01` and `0.001`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fedhet.core import check, trees
from fedhet.core.client import FedClient
from fedhet.core.messages import Broadcast, Extras, Update
from fedhet.core.phases import Phase
from fedhet.core.setting import Setting
from fedhet.core.strategy import FedStrategy
from fedhet.core.trees import AnyTree, Prepared, Tree
from fedhet.methods.fedprox import add_proximal

ALPHA = "feddyn.alpha"
GRADIENT = "feddyn.g"  # client state: g_k


class FedDynClient(FedClient):
    """Trains on the gradient of L_k minus g_k, plus alpha (w - x)."""

    def train(self, msg: Broadcast) -> Update:
        update = super().train(msg)
        own = self.prepare(msg)
        moved = trees.Difference(trees.pick(update.weights, own["x"]), own["x"])
        g = trees.add(own["g"], moved, -msg.scalar(ALPHA))
        self.state.put(GRADIENT, trees.cast(g, own["g"]))
        return update

    def prepare(self, msg: Broadcast) -> Prepared:
        x = trees.pick(msg.weights, self.workspace.mergeable)
        return {"x": x, "g": self.state.get(GRADIENT) or trees.map(torch.zeros_like, x)}

    def gradient(self, grads: Tree, params: AnyTree, own: Prepared) -> None:
        if own:
            added, w, x, g = trees.columns(own["x"], grads, params, own["x"], own["g"])
            torch._foreach_sub_(added, g)
            add_proximal(added, w, x, self.msg.scalar(ALPHA))


class FedDyn(FedStrategy):
    """The plain mean of the weights, corrected by h."""

    name = "feddyn"
    client_cls = FedDynClient
    weighted = False
    only_means = only_weights = True
    memory = ("_h",)
    refuses_noise = "the noise of all earlier changes would add up in h"

    def __init__(self, setting: Setting, *, alpha: float = 0.1) -> None:
        self.alpha = check.number("method.alpha", alpha, open_low=0)
        super().__init__(setting)

    def setup(self) -> None:
        self._h = trees.zeros(trees.pick(self.workspace.initial, self.workspace.mergeable))

    def cohort_extras(self, phase: Phase, step: int, cohort: list[int]) -> Extras:
        return {ALPHA: self.alpha}

    def merge(self, updates: Iterator[Update], old: Tree) -> Tree:
        average = self.setting.merge.average()
        participants = 0
        for update in updates:
            average.add(update.change, 1.0)
            participants += 1
        moved = average.mean()  # the mean of w_k - x
        self._h = trees.add(self._h, moved, -self.alpha * participants / len(self.sizes))
        return trees.add(trees.add(old, moved), self._h, -1 / self.alpha)
