"""FedProx (Li et al. 2020, "Federated optimization in heterogeneous networks"): FedAvg with a
proximal term.

    min_w F_k(w) + mu/2 |w - x|^2 (eq. 2), so each local gradient is g + mu (w - x), with x the weights received this round

    down: x      up: w_k, n_k      client keeps: nothing      server keeps: x

Deviations: participants are weighted by n_k (the paper samples in proportion to n_k and averages
uniformly, equal in expectation); inexactness gamma and stragglers are not modelled. Default mu .01
(the papers here use .001 to 1); plain SGD needs lr mu < 2. mu = 0 is FedAvg, bit for bit."""

from __future__ import annotations

from torch import Tensor

from fedhet import check
from fedhet.client import FedClient
from fedhet.maths.fedprox import add_proximal
from fedhet.messages import Broadcast
from fedhet.plugin import Plugin
from fedhet.strategy import FedStrategy


class FedProxPlugin(Plugin):
    """The proximal term, over trained parameters that the server knows."""

    name = "fedprox"

    def __init__(self, *, mu: float = 0.01) -> None:
        self.mu = check.number("plugin.fedprox.mu", mu, low=0)
        super().__init__(mu=self.mu)

    def prepare(self, msg: Broadcast) -> None:
        site = self.client.site
        at = [(i, name) for i, name in enumerate(site.trained) if name in msg.weights]
        self._positions = [i for i, _ in at]
        self._anchors = [msg.weights[name] for _, name in at]
        self._params = [site.parameters[i] for i in self._positions]

    def gradient(self, grads: list[Tensor]) -> None:
        if self.mu:
            add_proximal([grads[i] for i in self._positions], self._params, self._anchors, self.mu)


class FedProxClient(FedClient):
    """Plain FedAvg training; the plug-in adds the term."""


class FedProx(FedStrategy):
    """FedAvg with the plug-in above (conf/method/fedprox.yaml lists it)."""

    name = "fedprox"
    client_cls = FedProxClient
    requires = "fedprox"
