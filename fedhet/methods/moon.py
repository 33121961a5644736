"""MOON: model-contrastive learning (Li, He and Song 2021).

The features of each sample are held near those of the received model, and away from those of the
client's previous local model.

    min_w  F_k(w) + mu mean_i l_i(w)
    l_i = -log(e^{s_g / tau} / (e^{s_g / tau} + e^{s_p / tau}))
    s_g = cos(z(w; x_i), z(x; x_i))
    s_p = cos(z(w; x_i), z(w_prev; x_i))

Here z is the input of the head, x the received model, and w_prev the client's own model at the end
of its last participation.

    down:          x
    up:            w_k, n_k
    client keeps:  w_prev, buffers included
    server keeps:  x

The other two models are in eval mode and without gradients. In a client's first participation,
w_prev would be x: the term is then log 2 and has no gradient. With mu = 0 the method is FedAvg, bit
for bit.

Deviations and choices: the networks of the paper have a projection head (two layers, 256 wide)
before the output layer, which is trained and averaged like every other layer. It is therefore a
property of the model: to have it, let `features` end with it.

Defaults: mu = 1, which the paper tunes in {0.1, 1, 5, 10} (5 for CIFAR-10, 1 for CIFAR-100 and
Tiny-ImageNet); tau = 0.5, as in the paper.

Reference: Li, He and Song 2021, "Model-contrastive federated learning".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fedhet.core.check import setting
from fedhet.core.messages import Broadcast, Update
from fedhet.core.plugin import Plugin, Terms
from fedhet.core.training import Batch
from fedhet.core.trees import AnyTree, Prepared
from fedhet.methods.fedavg import FedAvg
from fedhet.models.base import require_features

PREVIOUS = "moon.previous"  # client state
TERM = "moon.term"  # what is recorded


def contrastive(z: Tensor, z_global: Tensor, z_previous: Tensor, tau: float) -> Tensor:
    """Return the model-contrastive loss of each sample, shape (B,).

    It is -log(e^{s_g / tau} / (e^{s_g / tau} + e^{s_p / tau})), where s_g and s_p are the cosine
    similarities of z with z_global and with z_previous. The cosine with a zero vector is 0 (norms
    are bounded below by 1e-8).

    Args:
        z: (B, d) features of the model in training.
        z_global: (B, d) features of the global model.
        z_previous: (B, d) features of the client's previous model.
        tau: the temperature.
    """
    s_global = functional.cosine_similarity(z, z_global, dim=1, eps=1e-8)
    s_previous = functional.cosine_similarity(z, z_previous, dim=1, eps=1e-8)
    return -functional.logsigmoid((s_global - s_previous) / tau)


@dataclass(kw_only=True, eq=False)
class MoonPlugin(Plugin):
    """Adds the contrastive term to the loss of each sample."""

    name = "moon"
    needs_model = True

    mu: float = setting(1.0, low=0)
    tau: float = setting(0.5, open_low=0)

    # ---- server
    def setup(self) -> None:
        require_features(self.server.workspace.model, "moon")

    # ---- client
    def prepare(self, msg: Broadcast) -> Prepared | None:
        previous = self.client.state.get(PREVIOUS) if self.mu else None
        if previous is None:
            return None
        received = self.client.received_weights(msg)
        completed = self.client.workspace.completed
        return {"global": completed(received), "previous": completed(previous)}

    def losses(self, params: AnyTree, batch: Batch, own: Prepared) -> Terms:
        if not own:
            term = torch.full((len(batch.y),), math.log(2), device=batch.y.device)
        else:
            teacher = self.client.workspace.teacher
            with torch.no_grad():
                z_global, z_previous = (
                    teacher(own[key]).features(batch.x).flatten(1)  # type: ignore[operator]
                    for key in ("global", "previous")
                )
            term = contrastive(batch.z.flatten(1), z_global, z_previous, self.tau)
        return self.mu * term, {TERM: term}

    def finish(self, update: Update) -> None:
        """Keep the local model, and record the mean of the term without the factor mu.

        Each sample's term is the one with which it was trained.
        """
        if self.mu:
            workspace = self.client.workspace
            self.client.state.put(PREVIOUS, workspace.read([*workspace.shared, *workspace.kept]))
            terms = self.client.recorded(TERM)
            # No sample is drawn twice before all have been.
            if min(self.client.num_examples, len(terms)) >= max(1, workspace.min_count):
                update.metrics[TERM] = float(terms.mean())


@dataclass(frozen=True, kw_only=True)
class Moon(FedAvg):
    """FedAvg with the plug-in `moon`."""

    name = "moon"
    requires = MoonPlugin
