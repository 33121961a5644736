"""FedROD (Chen and Chao 2022, "On bridging generic and personalized federated learning for image
classification").

    generic head, body: FedAvg of  mean_i CE(g(x_i) + gamma log n_k, y_i)      personal head h_k:
    mean_i CE([g(x_i)] + h_k([z_i]), y_i) prediction: global g(x) = head(z), personal g(x) + h_k(z),
    with z = features(x), n_k the client's label counts, [] without gradient

    down: x, `fedrod.gamma`, `fedrod.init`      up: w_k, n_k      client keeps: h_k      server keeps: x

The balanced softmax makes every client train towards balanced classes; the personal head, a linear
layer like the model's head, learns what the client's own classes add to that. Both take one step
per batch, each with its own local optimiser, and x is what it would be without the personal head,
which never leaves the client. gamma = 0 makes x FedAvg's, bit for bit. n_k counts the set that is
trained on, so samples that a plug-in has drawn are in it; a class without samples gets no
probability. Both losses are cross entropies, whatever the task's criterion, but for a plug-in's own
phase, which trains on that. Defaults: gamma 1; h_k starts from zeros, so that a client's first
personal prediction is the global one (`copy`: from the common initial head). The paper's
hypernetwork for the personal heads is not implemented."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedhet import check, optimizers
from fedhet.client import FedClient
from fedhet.errors import ConfigError
from fedhet.maths.fedrod import balanced_softmax
from fedhet.messages import Broadcast, Extras, Update
from fedhet.phases import Phase
from fedhet.setting import Setting
from fedhet.strategy import FedStrategy
from fedhet.training import Batch

GAMMA, INIT, HEAD = "fedrod.gamma", "fedrod.init", "fedrod.head"


class Personal(nn.Module):
    """The model's logits plus those of a further head on the same features."""

    def __init__(self, model: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.model, self.head = model, head

    def forward(self, x: Tensor) -> Tensor:
        """x (B, ...) -> logits (B, classes)."""
        z = self.model.features(x)  # type: ignore[operator]
        found: Tensor = self.model.head(z) + self.head(z)  # type: ignore[operator]
        return found


class BothHeads:
    """Steps the model with the gradient that it is given, and the personal head with its own."""

    def __init__(
        self,
        generic: optimizers.Optimizer,
        personal: optimizers.Optimizer,
        gradient: Callable[[], list[Tensor]],
    ) -> None:
        self.generic, self.personal, self.gradient = generic, personal, gradient

    def step(self, grads: list[Tensor]) -> None:
        self.generic.step(grads)
        self.personal.step(self.gradient())


class FedRODClient(FedClient):
    """FedAvg under the balanced softmax; beside it, batch by batch, the personal head."""

    # set in the phase `train`, as are the label counts and, for each batch, the personal head's
    # loss
    _head: nn.Module
    _counts: Tensor
    _personal: Tensor

    def train(self, msg: Broadcast) -> Update:
        self._head = self._personal_head(msg)
        self._counts = torch.bincount(self.data.y, minlength=self.site.task.classes)
        update = super().train(msg)
        self.state.put(HEAD, self._head.state_dict())
        return update

    def losses(self, batch: Batch) -> Tensor:
        gamma = self.msg.extras.get(GAMMA)
        if not isinstance(gamma, float):  # a plug-in's own phase
            return super().losses(batch)
        self._personal = functional.cross_entropy(
            batch.logits.detach() + self._head(batch.z.detach()), batch.y
        )
        return balanced_softmax(batch.logits, batch.y, self._counts, gamma)

    def optimizer(self, params: list[nn.Parameter]) -> optimizers.Optimizer:
        generic = super().optimizer(params)
        if GAMMA not in self.msg.extras:
            return generic
        own = list(self._head.parameters())
        return BothHeads(
            generic,
            optimizers.make(self.local, own),
            lambda: list(torch.autograd.grad(self._personal, own)),
        )

    def _personal_head(self, msg: Broadcast) -> nn.Module:
        """What this client keeps, else the initial values."""
        head: nn.Module = deepcopy(self.site.model.head)  # type: ignore[assignment]
        start = {name: self.site.initial[f"head.{name}"] for name in head.state_dict()}
        if msg.extras[INIT] == "zeros":
            start = {name: torch.zeros_like(t) for name, t in start.items()}
        head.load_state_dict(self.state.get(HEAD) or start)
        return head.requires_grad_()

    def views(self, msg: Broadcast) -> dict[str, Callable[[], nn.Module]]:
        return {
            **super().views(msg),
            "personal": lambda: Personal(self.site.load(self.start(msg)), self._personal_head(msg)),
        }


class FedROD(FedStrategy):
    """FedAvg of the body and the generic head."""

    name = "fedrod"
    client_cls = FedRODClient
    evaluates = ("global", "personal")

    def __init__(self, setting: Setting, *, gamma: float = 1.0, init: str = "zeros") -> None:
        self.gamma = check.number("method.gamma", gamma, low=0)
        self.init = check.one_of("method.init", init, ("zeros", "copy"))
        model, classes = setting.site.model, setting.site.task.classes
        if not hasattr(model, "features") or not isinstance(
            getattr(model, "head", None), nn.Linear
        ):
            raise ConfigError(
                "method=fedrod adds a personal head to the model's: it needs features(x) and a"
                f" linear layer `head`, which {type(model).__name__} has not"
            )
        if not classes:
            raise ConfigError(
                "method=fedrod balances the classes of the clients; this task has none"
            )
        super().__init__(setting)

    def setup(self) -> None:
        self.evaluation_extras = {INIT: self.init}

    def cohort_extras(self, phase: Phase, step: int, cohort: list[int]) -> Extras:
        return {GAMMA: self.gamma, INIT: self.init}
