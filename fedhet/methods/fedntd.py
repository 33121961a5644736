"""FedNTD (Lee et al. 2022, "Preservation of the global knowledge by not-true distillation in
federated learning").

    min_w F_k(w) + beta tau^2 mean_i KL(q(x; x_i) || q(w; x_i)), with q the softmax of logits / tau
    over the C - 1 classes other than the label, and x the model received

    down: x      up: w_k, n_k      client keeps: nothing      server keeps: x

What the global model knows of the classes that a client lacks is kept, while the label is learnt
freely. The received model is in eval mode and without gradients. With two classes one is left and
the term is 0; one class is refused. beta = 0 is FedAvg, bit for bit. Defaults: beta 1, tau 1, as in
the paper. The factor tau^2 is in the authors' program, not in the paper's equation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedhet import check
from fedhet.client import KEPT, FedClient
from fedhet.errors import ConfigError
from fedhet.maths.fedntd import not_true_distillation
from fedhet.messages import Broadcast
from fedhet.plugin import Plugin
from fedhet.strategy import FedStrategy
from fedhet.training import Batch

GLOBAL = "fedntd.global"


class FedNTDPlugin(Plugin):
    """The distillation of each sample."""

    name = "fedntd"

    def __init__(self, *, beta: float = 1.0, tau: float = 1.0) -> None:
        self.beta = check.number("plugin.fedntd.beta", beta, low=0)
        self.tau = check.number("plugin.fedntd.tau", tau, open_low=0)
        super().__init__(beta=self.beta, tau=self.tau)
        self._global: nn.Module | None = None

    # ---- server
    def setup(self) -> None:
        classes = self.server.site.task.classes
        if classes < 2:
            raise ConfigError(
                f"fedntd distils the classes other than the label: the task has {classes} classes;"
                " 2 or more are needed"
            )

    # ---- client
    def prepare(self, msg: Broadcast) -> None:
        if self.beta:
            self._global = self.client.site.frozen(
                GLOBAL, {**(self.client.state.get(KEPT) or {}), **msg.weights}
            )

    def losses(self, batch: Batch) -> Tensor:
        if self._global is None:
            return batch.logits.new_zeros(len(batch.y))
        with torch.no_grad():
            logits_global = self._global(batch.x)
        logits = batch.logits.to(logits_global.dtype)  # bfloat16 under engine.amp
        return self.beta * not_true_distillation(logits, logits_global, batch.y, self.tau)


class FedNTDClient(FedClient):
    """Plain FedAvg training; the plug-in adds the distillation."""


class FedNTD(FedStrategy):
    """FedAvg with the plug-in above (conf/method/fedntd.yaml lists it)."""

    name = "fedntd"
    client_cls = FedNTDClient
    requires = "fedntd"
