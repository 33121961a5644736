"""MOON (Li, He and Song 2021, "Model-contrastive federated learning"): features are held near the
global model's.

    min_w F_k(w) + mu mean_i -log(e^{s_g / tau} / (e^{s_g / tau} + e^{s_p / tau})), with s_g and s_p
    the cosines of z(w; x_i) with z(x; x_i), of the model received, and z(w_prev; x_i), of the
    client's own at the end of its last participation

    down: x      up: w_k, n_k      client keeps: w_prev with its buffers      server keeps: x

z is what the head reads. The other two models are in eval mode and without gradients. In a client's
first participation w_prev would be x: the term is log 2 and has no gradient. mu = 0 is FedAvg, bit
for bit. Defaults: mu 1 (the paper tunes it in {.1, 1, 5, 10}: 5 for CIFAR-10, 1 for CIFAR-100 and
Tiny-ImageNet), tau .5. Deviation: the paper's networks have a projection head of two layers, 256
wide, before the output layer, which is trained and averaged like every layer. That is a property of
the model: end `features` with it to have it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fedhet import check
from fedhet.client import KEPT, FedClient
from fedhet.errors import ConfigError
from fedhet.maths.moon import contrastive
from fedhet.messages import Broadcast, Update
from fedhet.plugin import Plugin
from fedhet.strategy import FedStrategy
from fedhet.training import Batch

GLOBAL, PREVIOUS = "moon.global", "moon.previous"


class MoonPlugin(Plugin):
    """The contrastive term of each sample."""

    name = "moon"

    def __init__(self, *, mu: float = 1.0, tau: float = 0.5) -> None:
        self.mu = check.number("plugin.moon.mu", mu, low=0)
        self.tau = check.number("plugin.moon.tau", tau, open_low=0)
        super().__init__(mu=self.mu, tau=self.tau)
        self._others: list[nn.Module] = []
        self._terms: list[Tensor] = []

    # ---- server
    def setup(self) -> None:
        model = self.server.site.model
        if not hasattr(model, "features"):
            raise ConfigError(
                f"moon needs a model with features(x) and head(f); {type(model).__name__} has no"
                " features"
            )

    # ---- client
    def prepare(self, msg: Broadcast) -> None:
        site, state = self.client.site, self.client.state
        previous = state.get(PREVIOUS) if self.mu else None
        if previous is not None:
            self._others = [
                site.frozen(GLOBAL, {**(state.get(KEPT) or {}), **msg.weights}),
                site.frozen(PREVIOUS, previous),
            ]

    def losses(self, batch: Batch) -> Tensor:
        if self._others:
            with torch.no_grad():
                z_global, z_previous = (
                    model.features(batch.x).flatten(1)  # type: ignore[operator]
                    for model in self._others
                )
            term = contrastive(batch.z.flatten(1), z_global, z_previous, self.tau)
        else:
            term = torch.full((len(batch.y),), math.log(2), device=batch.y.device)
        self._terms.append(term.detach())
        return self.mu * term

    def finish(self, update: Update) -> None:
        """Keep the local model; the metric is the term's mean over the samples as they were trained
        on, without mu."""
        if self.mu:
            site = self.client.site
            self.client.state.put(PREVIOUS, site.read([*site.shared, *site.kept]))
            update.metrics["moon.term"] = float(torch.cat(self._terms).mean())


class MoonClient(FedClient):
    """Plain FedAvg training; the plug-in adds the term."""


class Moon(FedStrategy):
    """FedAvg with the plug-in above (conf/method/moon.yaml lists it)."""

    name = "moon"
    client_cls = MoonClient
    requires = "moon"
