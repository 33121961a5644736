"""Ditto: a personal model beside the global one, regularised towards it (Li et al. 2021).

FedAvg trains the global model x. Beside it, each participant trains a personal model v_k
(algorithm 1):

    v_k <- v_k - lr (g_k(v_k) + lam (v_k - x_t))    for `plocal_epochs` epochs

where x_t is the model as received in this round.

    down:          x, `ditto.lam`, `ditto.epochs`
    up:            w_k, n_k
    client keeps:  v_k, buffers included
    server keeps:  x

v_k starts from the common initial model, with which a client that has never taken part is also
evaluated. v_k is trained after w_k on the same batches, without plug-ins, and with its own
optimiser, random draws and batch norm statistics; x is therefore FedAvg's, bit for bit. With
lam = 0 the training of v_k is purely local.

The paper leaves open how the global problem is solved; here it is FedAvg, weighted by n_k.

Defaults: lam = 1, which the paper tunes in `0.05` to 2, and one epoch.

Reference: Li et al. 2021, "Ditto: fair and robust federated learning through personalization".
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fedhet.core import check, trees
from fedhet.core.client import FedClient
from fedhet.core.messages import Broadcast, Extras, Update
from fedhet.core.phases import Phase
from fedhet.core.setting import Setting
from fedhet.core.strategy import FedStrategy
from fedhet.core.trees import AnyTree, Prepared, Tree
from fedhet.methods.fedprox import add_proximal

LAM = "ditto.lam"
EPOCHS = "ditto.epochs"
PERSONAL = "ditto.v"  # client state


class DittoClient(FedClient):
    """FedAvg's training, then that of the personal model."""

    def train(self, msg: Broadcast) -> Update:
        update = super().train(msg)
        local_model = self.workspace.read(list(self.workspace.initial))
        with self.workspace.seeded("ditto", msg.phase, msg.step, msg.pid):
            self.state.put(PERSONAL, self._train_personal(msg))
        self.workspace.load(local_model)  # plug-ins read it before the reply leaves
        return update

    def _train_personal(self, msg: Broadcast) -> Tree:
        """v_k after the epochs of this round."""
        workspace = self.workspace
        model = workspace.load(self._personal_weights())
        data = workspace.train_data(self.pid)
        received = trees.pick(msg.weights, workspace.trained)
        self.train_model(model, data, received, epochs=msg.epochs(EPOCHS), hooks=False)
        return workspace.read([*workspace.shared, *workspace.kept])

    def _personal_weights(self) -> Tree:
        """v_k as this client keeps it, or else its initial value."""
        return {**self.workspace.initial, **(self.state.get(PERSONAL) or {})}

    def gradient(self, grads: Tree, params: AnyTree, own: Prepared) -> None:
        if own:  # x_t, while v_k is trained
            pulled, w, x = trees.columns(own, grads, params, own)
            add_proximal(pulled, w, x, self.msg.scalar(LAM))

    def views(self, msg: Broadcast) -> dict[str, Callable[[], nn.Module]]:
        personal = {"personal": lambda: self.workspace.load(self._personal_weights())}
        return {**super().views(msg), **personal}


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
