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
the server sends; it needs lr mu < 2, or plain SGD diverges. mu = 0 is FedAvg, bit for bit.

Deviations and choices:

- Participants are drawn uniformly and weighted by n_k. The paper draws them with probabilities
  proportional to n_k and takes the plain mean, which is equal in expectation.
- Every client trains for the same number of epochs: neither the inexactness gamma nor stragglers
  are modelled.

Default: `mu = 0.01`. The papers that compare with FedProx use values from `0.001` to 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedhet.core import trees
from fedhet.core.check import setting
from fedhet.core.messages import Broadcast
from fedhet.core.plugin import Plugin
from fedhet.core.trees import AnyTree, Prepared, Tree
from fedhet.methods.fedavg import FedAvg


def add_proximal(
    grads: list[Tensor], params: Sequence[Tensor], anchors: Sequence[Tensor], mu: float
) -> None:
    """Add the gradient of the proximal term in place: g <- g + mu (w - x) (eq. 2).

    Args:
        grads: g, one tensor per parameter.
        params: the current parameters w, of the same shapes.
        anchors: the parameters x towards which the term pulls, of the same shapes.
        mu: the strength of the term.
    """
    torch._foreach_add_(grads, torch._foreach_sub(list(params), list(anchors)), alpha=mu)


@dataclass(kw_only=True, eq=False)
class FedProxPlugin(Plugin):
    """Adds the gradient of the proximal term to every local gradient."""

    name = "fedprox"
    needs_model = True
    needs_steps = True  # at the received model the term has no gradient
    changes_gradients = False  # `gradient` adds the gradient of a term of the loss

    mu: float = setting(0.01, low=0)

    def prepare(self, msg: Broadcast) -> Tree:
        return {
            name: msg.weights[name] for name in self.client.workspace.trained if name in msg.weights
        }

    def gradient(self, grads: Tree, params: AnyTree, own: Prepared) -> None:
        if self.mu:
            pulled, w, x = trees.columns(own, grads, params, own)
            add_proximal(pulled, w, x, self.mu)


FedProx = FedAvg.preset("FedProx", FedProxPlugin)
