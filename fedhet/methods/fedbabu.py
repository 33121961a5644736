"""FedBABU: FedAvg trains the body of the model, and not its head (Oh, Kim and Yun 2022).

The paper is "FedBABU: toward enhanced representation for federated image classification"; this is
its algorithm 1. The head is the module `model.head`, the last linear layer; the body is the rest.

    client: w_body <- E epochs of local SGD from w_body = x_body, with the head fixed
    server: x_body <- sum_k p_k w_k,body,  p_k = n_k / sum_j n_j
    personal model: (x_body, head), fine-tuned for `finetune_epochs` on the client's training data

    down:          x_body
    up:            w_body, n_k
    client keeps:  nothing
    server keeps:  x_body, and the initial head

All clients have the same head from the beginning. The head never travels. The local optimiser does
not hold it, so neither weight decay nor momentum moves it.

Every evaluation scores two views: "global" is the received model, "personal" the fine-tuned model.
Fine-tuning uses the settings of the local training (group `client`), without a decay of the
learning rate and without plug-ins. It changes neither the server's model nor a client's state.

Deviations and choices: none. `finetune=head` and `finetune=body` fine-tune one part only.

Defaults: 5 epochs of fine-tuning of body and head (`full`), as in the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from fedhet.core.authors import (
    Client,
    ClientContext,
    ConfigError,
    Message,
    Method,
    RunSetup,
    Scope,
    State,
    Workspace,
    setting,
)
from fedhet.core.check import MOST_EPOCHS


class FedBABUClient(Client):
    """Trains the body as in FedAvg, and also evaluates the model after fine-tuning."""

    def views(
        self, msg: Message, state: State, ctx: ClientContext
    ) -> dict[str, Callable[[], nn.Module]]:
        personal = {"personal": lambda: self._fine_tuned(msg, ctx)}
        return {**super().views(msg, state, ctx), **personal}

    def _fine_tuned(self, msg: Message, ctx: ClientContext) -> nn.Module:
        part, epochs = self.options.finetune, self.options.finetune_epochs
        names = [
            name
            for name in ctx.workspace.trainable
            if part == "full" or in_head(name) == (part == "head")
        ]
        tuned = ctx.fit(msg.weights, data=ctx.own, epochs=epochs, names=names, alone=True)
        return ctx.model(tuned.params)


@dataclass(frozen=True, kw_only=True)
class FedBABU(Method):
    """Averages the bodies of the clients' models."""

    name = "fedbabu"
    client = FedBABUClient

    finetune_epochs: int = setting(5, low=0, high=MOST_EPOCHS)
    finetune: str = setting("full", allowed=("full", "head", "body"))

    @classmethod
    def scope(cls, model: nn.Module) -> Scope:
        body = body_names(model, "method=fedbabu freezes the head of the model")
        return Scope(body, body, "method=fedbabu trains only the layers before the head")

    def evaluates(self, workspace: Workspace) -> dict[str, Sequence[str] | None]:
        return {"global": (), "personal": None}

    def setup(self, setup: RunSetup) -> State:
        if self.finetune == "head" and self.finetune_epochs:
            setup.workspace.require(in_head, "method=fedbabu fine-tunes the layers of the head")
        return {}


def in_head(name: str) -> bool:
    """Whether the tensor with this name belongs to the head."""
    return name.startswith("head.")


def body_names(model: nn.Module, why: str) -> Callable[[str], bool]:
    """Return a function that says whether the tensor with a given name belongs to the body.

    The body is the whole model except the head.

    Args:
        model: a model of any origin.
        why: the beginning of the error message, which says what the method does with the head.

    Raises:
        ConfigError: the model has no module `head` with parameters.
    """
    head = getattr(model, "head", None)
    if not isinstance(head, nn.Module) or not list(head.parameters()):
        raise ConfigError(
            f"{why}, a module `head` with parameters; {type(model).__name__} has none"
        )
    return lambda name: not in_head(name)
