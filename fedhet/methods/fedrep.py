"""FedRep: a shared body, trained after the client's own head (Collins et al. 2021); and FedPer.

The paper is "Exploiting shared representations for personalized federated learning"; this is its
algorithm 1. The head is the module `model.head`, the last layer; the body is the rest of the model.

    client: h_k <- `head_epochs` epochs of local SGD from h_k, with the body fixed at x
            w_k <- E epochs of local SGD from w = x, with the head fixed at h_k
    server: x <- 1/|P| sum_{k in P} w_k, over the participants P
    personal model: (x, h_k)

    down:          x
    up:            w_k, n_k
    client keeps:  h_k
    server keeps:  x

The heads never travel. They start from the common initial head. A client that has never taken part
is evaluated with the initial head. There is no global model, and only personal models are
evaluated.

`joint=true` is FedPer (Arivazhagan et al. 2019, "Federated learning with personalization layers"):
each step trains body and head together, and the server weights the bodies by n_k, as in that paper.

Plug-ins act on the training of the body (with `joint=true`, of body and head). The separate
training of the head uses the data that plug-ins have changed, but not the plug-ins' terms, weights
or gradients.

Deviations and choices: the authors' code weights the bodies by n_k, and trains all heads for ten
epochs at the end. The paper has a plain mean and no such epochs, and this method follows the paper.

Defaults: `head_epochs = 10`, as in most of the paper's experiments; the body trains for
client.epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from fedhet.core.authors import (
    Client,
    ClientContext,
    Message,
    Method,
    Result,
    RunSetup,
    Scope,
    State,
    Step,
    Update,
    Workspace,
    serves,
    setting,
)
from fedhet.core.check import MOST_EPOCHS
from fedhet.methods.fedbabu import body_names, in_head


class FedRepClient(Client):
    """Trains its head, then the body; or both together."""

    @serves
    def train(self, msg: Message, state: State, ctx: ClientContext) -> tuple[Result, State]:
        if self.options.joint:
            return super().train(msg, state, ctx)
        body = ctx.workspace.mergeable
        head = [name for name in ctx.workspace.trained if name not in body]
        own = ctx.fit(msg.weights, epochs=self.options.head_epochs, names=head, alone=True)
        return Result(ctx.fit(own.params, names=body).params), state


@dataclass(frozen=True, kw_only=True)
class FedRep(Method):
    """Averages the bodies of the clients' models."""

    name = "fedrep"
    client = FedRepClient

    head_epochs: int = setting(10, low=0, high=MOST_EPOCHS)
    joint: bool = setting(False)

    @classmethod
    def scope(cls, model: nn.Module) -> Scope:
        return Scope(shared=body_names(model, "method=fedrep keeps the head of the model"))

    def evaluates(self, workspace: Workspace) -> dict[str, Sequence[str]]:
        return {"personal": ()}  # personal models differ in the heads, which stay with the clients

    def setup(self, setup: RunSetup) -> State:
        own = "" if self.joint else " in a phase of their own"
        setup.workspace.require(
            lambda name: not in_head(name), f"method=fedrep trains the layers before the head{own}"
        )
        if self.head_epochs and not self.joint:
            setup.workspace.require(in_head, f"method=fedrep trains the layers of the head{own}")
        return {}

    @property
    def breaks(self) -> dict[str, str]:
        return {} if self.joint else {"sample weights": "the paper has the plain mean"}

    def weight(self, step: Step, update: Update) -> float:
        return float(update.n) if self.joint else 1.0
