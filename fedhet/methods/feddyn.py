"""FedDyn: a linear and a quadratic term make the clients' optima agree (Acar et al. 2021).

The paper is "Federated learning based on dynamic regularization"; this is its algorithm 1, with m
clients and the participants P.

    client: w_k <- E epochs of local SGD on L_k(w) - <g_k, w> + alpha/2 |w - x|^2, from w = x
            g_k <- g_k - alpha (w_k - x)
    server: h <- h - alpha/m sum_{k in P} (w_k - x)
            x <- 1/|P| sum_{k in P} w_k - h/alpha

    down:          x
    up:            w_k
    client keeps:  g_k, which is 0 before its first participation
    server keeps:  x, h

If the clients solve their problems exactly, g_k is the gradient of L_k at w_k, and h is the mean of
the g_k. The model then converges to a point with h = 0. This is the optimum of the plain mean of
the L_k, whatever the amount of local work. As in the paper, the means have no weights. The method
therefore refuses plug-ins that weight clients.

Deviations and choices:

- The paper minimises the local problem exactly. Here, as in the paper's experiments, clients train
  for E epochs of SGD instead.
- The authors' code divides alpha by a client's share of the samples. The paper has one alpha for
  all clients, and so does this method.
- Clients without data do not count in m.
- With `on_lost_state=restart`, a client that has lost g_k begins again with 0, but h keeps the lost
  g_k. The model then converges to a point at which the gradients of the L_k and the lost g_k sum
  to 0.
- The terms, g_k and h cover the parameters that are trained and shared. Buffers are averaged
  separately.

Default: `alpha = 0.1`, the largest of the paper's values (`0.1`, `0.01` and `0.001`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fedhet.core.authors import (
    Client,
    ClientContext,
    Merged,
    Message,
    Method,
    Result,
    RunSetup,
    State,
    Step,
    Term,
    Tree,
    Update,
    as_given,
    serves,
    setting,
    trees,
)
from fedhet.methods.fedprox import away


class FedDynClient(Client):
    """Trains on the gradient of L_k minus g_k, plus alpha (w - x)."""

    @serves
    def train(self, msg: Message, state: State, ctx: ClientContext) -> tuple[Result, State]:
        alpha = self.options.alpha
        x = trees.pick(msg.weights, ctx.workspace.mergeable)
        g = state.get("g") or trees.map(torch.zeros_like, x)
        # g_k is the gradient of <g_k, w>
        terms = [Term("gradient", as_given, g, -1.0), Term("gradient", away, x, alpha)]
        w = ctx.fit(msg.weights, terms).params
        moved = trees.Difference(trees.pick(w, x), x)
        return Result(w), {"g": trees.cast(trees.add(g, moved, -alpha), g)}


@dataclass(frozen=True, kw_only=True)
class FedDyn(Method):
    """Takes the plain mean of the weights, and corrects it by h, which is the server's state."""

    name = "feddyn"
    client = FedDynClient
    breaks = {
        "used weights": "the means of the paper are plain",
        "noise": "the noise of all earlier changes would add up in h",
    }

    alpha: float = setting(0.1, open_low=0)

    def setup(self, setup: RunSetup) -> State:
        workspace = setup.workspace
        return {"h": trees.zeros(trees.pick(workspace.initial, workspace.mergeable))}

    def merge(self, step: Step, state: State, old: Tree, updates: Iterator[Update]) -> Merged:
        average, participants = step.average(), 0
        for u in updates:
            average.add(u.change, 1.0)
            participants += 1
        moved = average.mean()  # the mean of w_k - x
        clients = sum(map(bool, step.workspace.task.sizes))  # m; clients without data do not count
        h = trees.add(state["h"], moved, -self.alpha * participants / clients)
        return Merged(trees.add(trees.add(old, moved), h, -1 / self.alpha), {"h": h})
