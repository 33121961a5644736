"""FedBABU (Oh, Kim and Yun 2022, "FedBABU: toward enhanced representation for federated image
classification").

    the body (all but the last linear layer) by FedAvg; the head keeps its common initial value, at
    every client personal model: body and head, fine-tuned for `finetune_epochs` on the client's own
    training data

    down: x_body      up: w_body, n_k      client keeps: nothing      server keeps: x_body and the head as it was initialised

The head is the parameters of the module `model.head`. It is no parameter of the local optimiser, so
neither weight decay nor momentum moves it, and it never travels. At every evaluation the received
model ("global") and its fine-tuned form ("personal") are scored: fine-tuning uses the local
settings at the base rate, without plug-ins, and leaves no trace. Default 5 epochs of everything
(`full`), as in the paper."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fedhet import check
from fedhet.client import FedClient
from fedhet.errors import ConfigError
from fedhet.messages import Broadcast
from fedhet.setting import Setting
from fedhet.site import Scope
from fedhet.strategy import FedStrategy

HEAD, EPOCHS, PART = "head.", "fedbabu.finetune_epochs", "fedbabu.finetune"


class FedBABUClient(FedClient):
    """FedAvg on the body; fine-tunes what it evaluates."""

    def views(self, msg: Broadcast) -> dict[str, Callable[[], nn.Module]]:
        return {**super().views(msg), "personal": lambda: self._fine_tuned(msg)}

    def _fine_tuned(self, msg: Broadcast) -> nn.Module:
        """The site's model, fine-tuned; like every model it is overwritten, head included, when the
        next one is loaded."""
        site, epochs, part = self.site, msg.integer(EPOCHS), msg.text(PART)
        model = site.load(self.start(msg))
        head = {name: p for name, p in model.named_parameters() if name.startswith(HEAD)}
        body = dict(zip(site.trained, site.parameters, strict=True))
        try:
            for p in body.values():
                p.requires_grad_(part != "head")
            for p in head.values():
                p.requires_grad_(part != "body")
            self.train_model(model, site.train_data(self.pid), epochs=epochs, hooks=False)
        finally:
            for name, p in (body | head).items():
                p.requires_grad_(name in body)
        return model


class FedBABU(FedStrategy):
    """FedAvg of the body."""

    name = "fedbabu"
    client_cls = FedBABUClient
    evaluates = ("global", "personal")

    def __init__(
        self, setting: Setting, *, finetune_epochs: int = 5, finetune: str = "full"
    ) -> None:
        self.finetune_epochs = check.integer("method.finetune_epochs", finetune_epochs, low=0)
        self.finetune = check.one_of("method.finetune", finetune, ("full", "head", "body"))
        super().__init__(setting)

    def setup(self) -> None:
        self.evaluation_extras = {EPOCHS: self.finetune_epochs, PART: self.finetune}

    @classmethod
    def scope(cls, model: nn.Module) -> Scope:
        head = getattr(model, HEAD.rstrip("."), None)
        if not isinstance(head, nn.Module) or not list(head.parameters()):
            raise ConfigError(
                "method=fedbabu freezes the head of the model, a module `head` with parameters; "
                f"{type(model).__name__} has none"
            )
        return Scope(trained=_in_body, shared=_in_body)


def _in_body(name: str) -> bool:
    return not name.startswith(HEAD)
