"""FedROD: a balanced generic head and a personal head on one body (Chen and Chao 2022).

The balanced softmax makes every client train towards balanced classes; the personal head, a linear
layer like the head of the model, learns what the class frequencies of the client add to that.

    body, generic head:  FedAvg of  mean_i CE(g(x_i) + gamma log n_k, y_i)
    personal head h_k:   mean_i CE([g(x_i)] + h_k([z_i]), y_i)
    global prediction:   g(x) = head(z),  z = features(x)
    personal prediction: g(x) + h_k(z)

Here n_k are the client's label counts, and no gradient flows through [].

    down:          x, `fedrod.gamma`, `fedrod.init`
    up:            w_k, n_k
    client keeps:  h_k
    server keeps:  x

The model and the personal head take one step per batch, each with a gradient that is clipped by
itself. The personal head never leaves the client, and x is what it would be without it. With
gamma = 0, x is FedAvg's, bit for bit. n_k counts the set that is trained on, so samples drawn by a
plug-in are among them; a class without samples gets no probability. Both losses are cross entropies
whatever the task's criterion, except in a plug-in's own phase, which trains on the criterion.

Deviations and choices: the paper's hypernetwork for the personal heads is not implemented.

Defaults: gamma = 1, as in the FedDisk paper's comparison; h_k starts from zeros, so that the first
personal prediction of a client is the global one. With `init=copy` it starts from the common
initial head.

Reference: Chen and Chao 2022, "On bridging generic and personalized federated learning for image
classification".
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedhet.core import check
from fedhet.core.client import FedClient
from fedhet.core.messages import Broadcast, Extras, Update
from fedhet.core.phases import Phase
from fedhet.core.setting import Setting
from fedhet.core.strategy import FedStrategy
from fedhet.core.training import Batch
from fedhet.core.trees import AnyTree, Prepared
from fedhet.models.base import feature_head

GAMMA = "fedrod.gamma"
INIT = "fedrod.init"
HEAD = "fedrod.head"  # client state, and what begins the names of its parameters in training


def balanced_softmax(logits: Tensor, y: Tensor, counts: Tensor, gamma: float) -> Tensor:
    """Return the balanced softmax loss of each sample, shape (B,).

    It is the cross entropy of the adjusted logits l_c + gamma log n_c. A class with n_c = 0 gets
    no probability; gamma = 0 gives the plain cross entropy.

    Args:
        logits: (B, C) the logits l_c.
        y: (B,) labels.
        counts: (C,) the client's numbers n_c of samples by class.
        gamma: the strength of the adjustment.

    Raises:
        ValueError: a label has the count 0.
    """
    if not counts[y].all():
        raise ValueError(
            f"the labels include classes with count 0; the counts are {counts.tolist()}"
        )
    return functional.cross_entropy(balanced_logits(logits, counts, gamma), y, reduction="none")


def balanced_logits(logits: Tensor, counts: Tensor, gamma: float) -> Tensor:
    """Return the adjusted logits l_c + gamma log n_c, whose cross entropy is the loss."""
    return logits + torch.xlogy(gamma, counts.to(logits.dtype))


class TwoHeadModel(nn.Module):
    """The model's logits plus those of the personal head on the same features."""

    def __init__(self, model: nn.Module, personal_head: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.personal_head = personal_head

    def forward(self, x: Tensor) -> Tensor:
        """x (B, ...) -> logits (B, classes)."""
        z = self.model.features(x)  # type: ignore[operator]
        generic: Tensor = self.model.head(z)  # type: ignore[operator]
        return generic + self.personal_head(z)


class FedRODClient(FedClient):
    """FedAvg with the balanced softmax; the personal head is trained on the same batches."""

    def train(self, msg: Broadcast) -> Update:
        self.model = self.workspace.load(self.start(msg))
        head = self._personal_head(msg)
        beside = {f"{HEAD}.{name}": p for name, p in head.named_parameters()}
        self.train_model(self.model, self.data, self.prepare(msg), beside=beside)
        self.state.put(HEAD, head.state_dict())
        return self.reply()

    def prepare(self, msg: Broadcast) -> Prepared:
        return {"counts": torch.bincount(self.data.y, minlength=self.workspace.task.classes)}

    def losses(self, params: AnyTree, batch: Batch, own: Prepared) -> Tensor:
        if not own:  # a plug-in's own phase
            return self.workspace.task.criterion(batch.logits, batch.y)
        # Not `balanced_softmax`: its check of the labels would make each step wait for the device,
        # and these are the labels that were counted.
        logits = balanced_logits(batch.logits, own["counts"], self.msg.scalar(GAMMA))
        return functional.cross_entropy(logits, batch.y, reduction="none")

    def penalty(self, params: AnyTree, batch: Batch, own: Prepared) -> Tensor:
        """The personal head's loss, of which no gradient reaches the model."""
        if not own:
            return batch.logits.new_zeros(())
        with self.workspace.autocast():
            z, bias = batch.z.detach(), params.get(f"{HEAD}.bias")
            own_logits = functional.linear(z, params[f"{HEAD}.weight"], bias)
            return functional.cross_entropy(batch.logits.detach() + own_logits, batch.y)

    def _personal_head(self, msg: Broadcast) -> nn.Module:
        """h_k as this client keeps it, or else its initial value."""
        head: nn.Module = deepcopy(self.workspace.model.head)  # type: ignore[assignment]
        values = self.state.get(HEAD)
        if values is None:
            values = {name: self.workspace.initial[f"head.{name}"] for name in head.state_dict()}
            if msg.text(INIT) == "zeros":
                values = {name: torch.zeros_like(t) for name, t in values.items()}
        head.load_state_dict(values)
        return head.requires_grad_()

    def views(self, msg: Broadcast) -> dict[str, Callable[[], nn.Module]]:
        return {**super().views(msg), "personal": lambda: self._two_head_model(msg)}

    @classmethod
    def personal_module(cls, model: nn.Module) -> nn.Module:
        return TwoHeadModel(model, deepcopy(model.head))  # type: ignore[arg-type]

    def _two_head_model(self, msg: Broadcast) -> nn.Module:
        return TwoHeadModel(
            self.workspace.load(self.received_weights(msg)), self._personal_head(msg)
        )


class FedROD(FedStrategy):
    """FedAvg of the body and the generic head."""

    name = "fedrod"
    client_cls = FedRODClient
    evaluates = ("global", "personal")

    def __init__(self, setting: Setting, *, gamma: float = 1.0, init: str = "zeros") -> None:
        self.gamma = check.number("method.gamma", gamma, low=0)
        self.init = check.one_of("method.init", init, ("zeros", "copy"))
        super().__init__(setting)

    def setup(self) -> None:
        self.workspace.task.check_classes("method=fedrod")
        why = "method=fedrod balances the classes of the clients and adds a personal head"
        head = feature_head(self.workspace.model, why)
        self.personal_names = [f"personal_head.{name}" for name in head.state_dict()]
        self.evaluation_extras = {INIT: self.init}

    def cohort_extras(self, phase: Phase, step: int, cohort: list[int]) -> Extras:
        return {GAMMA: self.gamma, INIT: self.init}
