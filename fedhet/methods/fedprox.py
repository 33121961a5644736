"""FedProx: FedAvg with a proximal term in the local loss (Li et al. 2020).

The paper is "Federated optimization in heterogeneous networks".

    client: minimise F_k(w) + mu/2 |w - x|^2                               (eq. 2)
            w <- w - lr (g(w) + mu (w - x)), from w = x
    server: x <- sum_k p_k w_k,  p_k = n_k / sum_j n_j

    down:          x
    up:            w_k, n_k
    client keeps:  nothing
    server keeps:  x

x is the model that the client received in this round. The term covers the trained parameters that
the server sends. Plain SGD diverges unless lr mu < 2. mu = 0 is FedAvg, bit for bit.

Deviations and choices:

- The server draws participants uniformly and weights them by n_k. The paper draws them with
  probabilities proportional to n_k and takes the plain mean, which is equal in expectation.
- Every client trains for the same number of epochs. This method models neither the inexactness
  gamma nor stragglers.

Default: `mu = 0.01`. The papers that compare with FedProx use values from `0.001` to 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedhet.core.authors import (
    AnyTree,
    ClientContext,
    Message,
    Plugin,
    State,
    Term,
    Tree,
    setting,
    trees,
)
from fedhet.methods.fedavg import FedAvg


def away(params: AnyTree, batch: None, x: AnyTree) -> Tree:
    """Return w - x; mu times this is the gradient of the proximal term (eq. 2).

    Args:
        params: the current parameters w.
        batch: not used.
        x: the parameters towards which the term pulls w; names of `params`, some or all.
    """
    w, anchors = trees.columns(x, params, x)
    return dict(zip(x, torch._foreach_sub(w, anchors), strict=True))


@dataclass(frozen=True, kw_only=True)
class FedProxPlugin(Plugin):
    """Adds the gradient of the proximal term to every local gradient."""

    name = "fedprox"
    needs = frozenset({"model", "local steps"})  # the term has no gradient at the received model

    mu: float = setting(0.01, low=0)

    def terms(self, msg: Message, state: State, ctx: ClientContext) -> list[Term]:
        if not self.mu:
            return []
        return [Term("gradient", away, trees.pick(msg.weights, ctx.workspace.mergeable), self.mu)]


@dataclass(frozen=True, kw_only=True)
class FedProx(FedAvg):
    """FedAvg with the plug-in `fedprox`."""

    name = "fedprox"
    requires = FedProxPlugin
