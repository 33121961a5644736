"""DynReg: a linear and a quadratic term make the clients' optima agree (Acar et al. 2021).

The paper is "Federated learning based on dynamic regularization"; this is its algorithm 1, with m
clients and the participants P.

    client: w_k = argmin_w L_k(w) - <g_k, w> + alpha/2 |w - x|^2,  in epochs of SGD
            g_k <- g_k - alpha (w_k - x)
    server: h <- h - alpha/m sum_{k in P} (w_k - x)
            x <- 1/|P| sum_{k in P} w_k - h/alpha

    down:          x
    up:            w_k
    client keeps:  g_k, which is 0 before its first participation
    server keeps:  x, h

alpha = 0 is FedAvg with equal weights: h is 0 then, and h/alpha is taken as 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fedhet.core import trees
from fedhet.core.check import setting
from fedhet.core.client.context import ClientContext
from fedhet.core.kernel import (
    Client,
    Merged,
    Message,
    Method,
    Result,
    State,
    Step,
    Term,
    Update,
    serves,
)
from fedhet.core.server.run_setup import RunSetup
from fedhet.core.trees import AnyTree, Tree


def linear(params: AnyTree, batch: None, g: Tree) -> Tree:
    """g_k, the gradient of <g_k, w>."""
    return g


def quadratic(params: AnyTree, batch: None, x: Tree) -> Tree:
    """w - x, which times alpha is the gradient of the quadratic term."""
    return {name: params[name] - x[name] for name in x}


class DynRegClient(Client):
    """Trains on the gradient of L_k minus g_k, plus alpha (w - x)."""

    @serves
    def train(self, msg: Message, state: State, ctx: ClientContext) -> tuple[Result, State]:
        alpha = self.options.alpha
        if not alpha:
            return super().train(msg, state, ctx)
        x = trees.pick(msg.weights, ctx.workspace.mergeable)
        g = state.get("g") or trees.map(torch.zeros_like, x)
        terms = [Term("gradient", linear, g, -1.0), Term("gradient", quadratic, x, alpha)]
        w = ctx.fit(msg.weights, terms).params
        moved = trees.Difference(trees.pick(w, x), x)
        return Result(w), {"g": trees.cast(trees.add(g, moved, -alpha), g)}


@dataclass(frozen=True, kw_only=True)
class DynReg(Method):
    """The mean of the weights, corrected by the accumulated drift h, which is the server's state.

    The mean is under the weights, which plug-ins may set and scale; the sum in h has none.
    """

    name = "dynreg"
    client = DynRegClient
    breaks = {
        "means": "sums of changes",
        "weights alone": "sums of changes",
        "sample weights": "clients count alike",
    }

    alpha: float = setting(0.1, low=0)

    def setup(self, setup: RunSetup) -> State:
        workspace = setup.workspace
        return {"h": trees.zeros(trees.pick(workspace.initial, workspace.mergeable))}

    def weight(self, step: Step, update: Update) -> float:
        return 1.0

    def merge(self, step: Step, state: State, old: Tree, updates: Iterator[Update]) -> Merged:
        moved, drifted = trees.Sum(), trees.Sum()
        for update in updates:
            moved.add(update.change, update.weight)
            drifted.add(update.change, 1.0)
        new, h = trees.add(moved.mean(), old), state["h"]
        if self.alpha:
            h = trees.add(h, drifted.tree, -self.alpha / len(step.workspace.task.sizes))
            new = trees.add(new, h, -1 / self.alpha)
        return Merged(new, {"h": h})
