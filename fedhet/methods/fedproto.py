"""FedProto: each client's model is drawn to global class prototypes (Tan et al. 2022).

The paper is "FedProto: federated prototype learning across heterogeneous clients". Clients exchange
the class means of their features f(x), the input of the last layer, and no weights.

    client:     mean_i CE(model(x_i), y_i) + lam sum_c |C_B^c - C^c|                  (eq. 7, 8)
                with C_B^c the mean of f(x) over the samples of class c in the batch
                C_k^c = mean of f(x) over all training samples of class c, after training   (eq. 3)
    server:     C^c = sum_k n_k^c C_k^c / sum_k n_k^c                                  (eq. 6)
    prediction: argmin_c |f(x) - C^c|                                                  (eq. 4)

    down:          `fedproto.prototypes` (C), `fedproto.lam`
    up:            `fedproto.prototypes` (C_k), `fedproto.counts` (n_k^c)
    client keeps:  its whole model
    server keeps:  C (slot `prototypes`)

No weights travel and no model is shared: the model slot keeps its initial value, from which every
client starts, and only personal models are evaluated, by the prototypes that the server has. The
sums over c have the classes that have a prototype: none in the first round, in which every client
trains alone. The C^c of a class that no participant has stays unchanged.

Privacy: the label counts of each client leave it. A client leaves out the classes of which it has
fewer than `privacy.min_count` samples, as FedGen's do. The paper has no such limit
(`privacy.min_count=0`).

Deviations and choices:

- Eq. 6 divides the weighted mean by the number of clients that have the class, too, so that
  prototypes on which all clients agree would shrink. That factor is left out: the text calls it an
  average. The authors' code takes the plain mean over the clients.
- The distance is the L2 distance of the paper. The authors' code has the mean of the squared
  differences, sample by sample.
- The paper does not say whose prototypes predict. Here they are the global ones, which a client
  also has for classes of which it has no sample. The last layer is trained, and predicts nothing.

Default: `lam = 0.1`. The paper has 1, and its code another distance (above): with the L2 distance
and lam = 1 all features and prototypes become 0 on the digits (docs/methods/fedproto.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from fedhet.core import check
from fedhet.core.client import FedClient
from fedhet.core.counts import suppressed
from fedhet.core.messages import Broadcast, Extras, Update
from fedhet.core.phases import Phase
from fedhet.core.setting import Setting
from fedhet.core.strategy import FedStrategy
from fedhet.core.training import Batch
from fedhet.core.trees import AnyTree, Prepared, Tree
from fedhet.core.workspace import Scope
from fedhet.maths import fedpcl as maths
from fedhet.methods.fedpcl import (
    SLOT,
    PrototypeClassifier,
    class_means,
    no_prototypes,
    renewed,
)
from fedhet.models.base import feature_head

PROTOTYPES = "fedproto.prototypes"
COUNTS = "fedproto.counts"
LAM = "fedproto.lam"


class FedProtoClient(FedClient):
    """Keeps its model, and sends prototypes and counts."""

    def train(self, msg: Broadcast) -> Update:
        update = super().train(msg)
        classes = self.workspace.task.classes
        counts = self.workspace.train_data(self.pid).y.bincount(minlength=classes)
        counts = suppressed(counts, self.workspace.min_count)
        mean = class_means(self, self.model)[0].to(self.workspace.initial["head.weight"].dtype)
        update.extras = {PROTOTYPES: {"mean": mean.where(counts[:, None] > 0, 0)}, COUNTS: counts}
        return update

    def prepare(self, msg: Broadcast) -> Tree:
        return msg.tree(PROTOTYPES)

    def penalty(self, params: AnyTree, batch: Batch, own: Prepared) -> Tensor:
        if not own:  # a plug-in's own phase
            return batch.logits.new_zeros(())
        far = maths.distances(batch.z, batch.y, own["mean"], own["has"])
        return self.msg.scalar(LAM) * far

    def views(self, msg: Broadcast) -> dict[str, Callable[[], nn.Module]]:
        return {"personal": lambda: self._classifier(msg)}

    def _classifier(self, msg: Broadcast) -> nn.Module:
        """The personal model: this client's features and the server's prototypes."""
        model = self.workspace.load(self.start(msg))
        return PrototypeClassifier(model, msg.tree(PROTOTYPES), maths.nearness)

    @classmethod
    def personal_module(cls, model: nn.Module) -> nn.Module:
        return PrototypeClassifier.around(model, maths.nearness)


class FedProto(FedStrategy):
    """Averages prototypes instead of weights."""

    name = "fedproto"
    client_cls = FedProtoClient
    evaluates = ("personal",)
    weighted = False
    enters = "prototypes"
    refuses_noise = "its clients send exact label counts"

    def __init__(self, setting: Setting, *, lam: float = 0.1) -> None:
        self.lam = check.number("method.lam", lam, low=0)
        super().__init__(setting)

    @classmethod
    def scope(cls, model: nn.Module) -> Scope:
        return Scope(shared=lambda name: False)

    def setup(self) -> None:
        self.workspace.task.check_classes("method=fedproto")
        why = "method=fedproto compares the features that a model's last layer reads, by class"
        head = feature_head(self.workspace.model, why)
        self._none = no_prototypes(head, self.workspace.task.classes)
        self.evaluation_extras = {PROTOTYPES: self._none}

    def slots(self) -> dict[str, Tree]:
        return {SLOT: self._none}

    def cohort_extras(self, phase: Phase, step: int, cohort: list[int]) -> Extras:
        return {PROTOTYPES: self.weights[SLOT], LAM: self.lam}

    def check(self, update: Update) -> None:
        self._sent(update)

    def _sent(self, update: Update) -> tuple[Tensor, Tensor]:
        """A client's prototypes (C, d), and its label counts (C,)."""
        workspace = self.workspace
        counts = update.counts(
            COUNTS, update.num_examples, workspace.task.classes, workspace.min_count
        )
        return update.tree(PROTOTYPES, {"mean": self._none["mean"]})["mean"], counts

    def merge(self, updates: Iterator[Update], old: Tree) -> Tree:
        """The new prototypes; the model slot keeps its value."""
        means, counts = map(torch.stack, zip(*map(self._sent, updates), strict=True))
        self.weights[SLOT] = renewed(self.weights[SLOT], *maths.pooled(means, counts))
        self.evaluation_extras = {PROTOTYPES: self.weights[SLOT]}
        return {}
