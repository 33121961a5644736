"""FedRep: a shared body, trained after the client's own head (Collins et al. 2021); and FedPer.

The paper is "Exploiting shared representations for personalized federated learning"; this is its
algorithm 1. The head is the module `model.head`, the last layer; the body is the rest.

    client: h_k <- `head_epochs` epochs of local SGD from h_k, with the body fixed at x
            w_k <- E epochs of local SGD from w = x, with the head fixed at h_k
    server: x <- 1/|P| sum_{k in P} w_k, over the participants P
    personal model: (x, h_k)

    down:          x, `fedrep.head_epochs`, `fedrep.joint`
    up:            w_k, n_k
    client keeps:  h_k
    server keeps:  x

The heads never travel. They start from the common initial head, which also serves a client that has
never taken part. There is no global model, and only personal models are evaluated.

`joint=true` is FedPer (Arivazhagan et al. 2019, "Federated learning with personalization layers"):
body and head take each step together, and the server weights the bodies by n_k, as that paper does.

Plug-ins act on the training whose result is sent. The epochs of a head by itself use the data that
plug-ins have changed, and none of their terms, weights or gradients.

Deviations and choices: the authors' code weights the bodies by n_k, and trains all heads for ten
epochs at the end. The paper has a plain mean and no such epochs, and so has this method.

Defaults: `head_epochs = 10`, as in most of the paper's experiments; the body's are client.epochs.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fedhet.core import check
from fedhet.core.client import FedClient
from fedhet.core.messages import Broadcast, Extras, Update
from fedhet.core.phases import Phase
from fedhet.core.setting import Setting
from fedhet.core.strategy import FedStrategy
from fedhet.core.training import only
from fedhet.core.workspace import Scope
from fedhet.methods.fedbabu import body_names, in_head

EPOCHS = "fedrep.head_epochs"
JOINT = "fedrep.joint"


class FedRepClient(FedClient):
    """Trains its head, then the body; or both together."""

    def train(self, msg: Broadcast) -> Update:
        if msg.boolean(JOINT):
            return super().train(msg)
        workspace = self.workspace
        self.model = workspace.load(self.start(msg))
        shared = frozenset(workspace.mergeable)
        with only(self.model, frozenset(workspace.trained) - shared):
            self.train_model(self.model, self.data, epochs=msg.epochs(EPOCHS), hooks=False)
        with only(self.model, shared):
            self.train_model(self.model, self.data, self.prepare(msg))
        return self.reply()

    def views(self, msg: Broadcast) -> dict[str, Callable[[], nn.Module]]:
        return {"personal": lambda: self.workspace.load(self.received_weights(msg))}


class FedRep(FedStrategy):
    """Averages the bodies of the clients' models."""

    name = "fedrep"
    client_cls = FedRepClient
    evaluates = ("personal",)
    personal_names = ()  # only the heads, which stay with the clients

    def __init__(self, setting: Setting, *, head_epochs: int = 10, joint: bool = False) -> None:
        self.head_epochs = check.integer("method.head_epochs", head_epochs, low=0)
        self.joint = check.boolean("method.joint", joint)
        super().__init__(setting)

    @classmethod
    def scope(cls, model: nn.Module) -> Scope:
        return Scope(shared=body_names(model, "method=fedrep keeps the head of the model"))

    def setup(self) -> None:
        own = "" if self.joint else " in a phase of their own"
        self.workspace.require(
            lambda name: not in_head(name), f"method=fedrep trains the layers before the head{own}"
        )
        if self.head_epochs and not self.joint:
            self.workspace.require(in_head, f"method=fedrep trains the layers of the head{own}")

    def cohort_extras(self, phase: Phase, step: int, cohort: list[int]) -> Extras:
        return {EPOCHS: self.head_epochs, JOINT: self.joint}

    def base_weight(self, update: Update) -> float:
        return super().base_weight(update) if self.joint else 1.0
