"""Ditto (Li et al. 2021, "Ditto: fair and robust federated learning through personalization",
algorithm 1).

    x by FedAvg; beside it, at each participant, `plocal_epochs` epochs of v_k <- v_k - lr (g_k(v_k) + lam (v_k - x_t))

    down: x, `ditto.lam`, `ditto.epochs`      up: w_k, n_k      client keeps: v_k      server keeps: x

x_t is the model as it was received in this round. v_k starts at the common initial model; who has
never taken part is scored with that. v_k is trained after w_k, with an optimiser, random draws and
batch norm statistics of its own, on the same batches, without plug-ins: x is FedAvg's bit for bit.
lam = 0 is purely local training. Default lam 1, one epoch; the paper tunes lam in .05 to 2.

The paper leaves open how the global problem is solved; here it is FedAvg, weighted by n_k.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from fedhet import check
from fedhet.client import FedClient
from fedhet.maths.fedprox import add_proximal
from fedhet.messages import Broadcast, Extras, Update
from fedhet.phases import Phase
from fedhet.setting import Setting
from fedhet.strategy import FedStrategy
from fedhet.trees import Tree

LAM, EPOCHS, PERSONAL = "ditto.lam", "ditto.epochs", "ditto.v"


class DittoClient(FedClient):
    """FedAvg's training, then that of the personal model."""

    _anchors: list[Tensor] | None = None  # x_t, while v_k is trained
    _lam: float

    def train(self, msg: Broadcast) -> Update:
        update = super().train(msg)
        sent = self.site.read(list(self.site.initial))
        with self.site.seeded("ditto", msg.phase, msg.step, msg.pid):
            self.state.put(PERSONAL, self._personal(msg))
        self.site.load(sent)  # plug-ins look at it before the reply leaves
        return update

    def _personal(self, msg: Broadcast) -> Tree:
        """v_k after this round's epochs."""
        site = self.site
        said: Mapping[str, Any] = msg.extras
        self._lam, self._anchors = said[LAM], [msg.weights[name] for name in site.trained]
        self.train_model(
            site.load(self._v()), site.train_data(self.pid), epochs=said[EPOCHS], hooks=False
        )
        self._anchors = None
        return site.read([*site.shared, *site.kept])

    def _v(self) -> Tree:
        return {**self.site.initial, **(self.state.get(PERSONAL) or {})}

    def gradient(self, grads: list[Tensor]) -> None:
        if self._anchors is not None:
            add_proximal(grads, self.site.parameters, self._anchors, self._lam)

    def views(self, msg: Broadcast) -> dict[str, Callable[[], nn.Module]]:
        return {**super().views(msg), "personal": lambda: self.site.load(self._v())}


class Ditto(FedStrategy):
    """FedAvg of the w_k; the v_k never leave their clients."""

    name = "ditto"
    client_cls = DittoClient
    evaluates = ("global", "personal")

    def __init__(self, setting: Setting, *, lam: float = 1.0, plocal_epochs: int = 1) -> None:
        self.lam = check.number("method.lam", lam, low=0)
        self.plocal_epochs = check.integer("method.plocal_epochs", plocal_epochs, low=1)
        super().__init__(setting)

    def cohort_extras(self, phase: Phase, step: int, cohort: list[int]) -> Extras:
        return {LAM: self.lam, EPOCHS: self.plocal_epochs}
