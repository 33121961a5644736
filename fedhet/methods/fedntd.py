"""FedNTD: distillation of the classes other than the label (Lee et al. 2022).

The received model teaches the local model the probabilities of the classes other than the label, so
that local training does not forget classes that the client lacks. The term leaves the probability
of the label itself free.

    min_w  F_k(w) + beta tau^2 mean_i KL(q(x; x_i) || q(w; x_i))
    q = softmax(logits / tau) over the C - 1 classes other than the label

Here x is the received model.

    down:          x
    up:            w_k, n_k
    client keeps:  nothing
    server keeps:  x

The received model is in eval mode and without gradients. With two classes only one class remains,
and the term is 0. The method refuses a task with fewer than two classes. With beta = 0 it is
FedAvg, bit for bit.

Deviations and choices: the factor tau^2 is in the authors' program, not in the equation of the
paper.

Defaults: beta = 1 and tau = 1, as in the paper.

Reference: Lee et al. 2022, "Preservation of the global knowledge by not-true distillation in
federated learning".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fedhet.core import check
from fedhet.core.authors import (
    AnyTree,
    Batch,
    ClientContext,
    ConfigError,
    Message,
    Plugin,
    RunSetup,
    State,
    Term,
    Tree,
    setting,
)
from fedhet.methods.fedavg import FedAvg


def not_true_distillation(logits: Tensor, logits_global: Tensor, y: Tensor, tau: float) -> Tensor:
    """Return the not-true distillation loss of each sample, shape (B,).

    It is tau^2 KL(global || local) between the two softmax(logits / tau) over the C - 1 classes
    other than the label. With two classes only one class remains, and the loss is 0.

    Args:
        logits: (B, C) logits of the local model, C > 1.
        logits_global: (B, C) logits of the global model.
        y: (B,) labels.
        tau: the temperature.
    """
    others = torch.arange(logits.shape[1] - 1, device=y.device)
    others = others + (others >= y[:, None])
    log_p = functional.log_softmax(logits_global.gather(1, others) / tau, 1)
    log_q = functional.log_softmax(logits.gather(1, others) / tau, 1)
    # Not functional.kl_div: vmap would compute it for one client after another.
    return tau**2 * (log_p.exp() * (log_p - log_q)).sum(1)


@dataclass(frozen=True, kw_only=True)
class FedNTDPlugin(Plugin):
    """Adds the distillation term to the loss of each sample."""

    name = "fedntd"
    needs = frozenset({"model", "local steps"})  # the term has no gradient at the received model

    beta: float = setting(1.0, low=0)
    tau: float = setting(1.0, open_low=0)

    def setup(self, setup: RunSetup) -> State:
        task = setup.workspace.task
        task.check_classes("plugin 'fedntd'")
        if task.classes < 2:
            raise ConfigError(
                "fedntd distils the classes other than the label, which needs at least two classes;"
                f" the task has {check.counted(task.classes, 'class', 'classes')}"
            )
        return {}

    def terms(self, msg: Message, state: State, ctx: ClientContext) -> list[Term]:
        if not self.beta:
            return []
        return [Term("loss", self._distil, ctx.workspace.completed(msg.weights))]

    def _distil(self, params: AnyTree, batch: Batch, own: Tree) -> Tensor:
        with torch.no_grad():
            teacher_logits = batch.workspace.teacher(own)(batch.x)
        logits = batch.logits.to(teacher_logits.dtype)  # they are bfloat16 under engine.amp
        return self.beta * not_true_distillation(logits, teacher_logits, batch.y, self.tau)


@dataclass(frozen=True, kw_only=True)
class FedNTD(FedAvg):
    """FedAvg with the plug-in `fedntd`."""

    name = "fedntd"
    requires = FedNTDPlugin
