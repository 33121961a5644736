"""FedROD: a balanced generic head and a personal head on one body (Chen and Chao 2022).

With the balanced softmax, every client trains the global model as if its classes were balanced. The
personal head, a linear layer like the head of the model, learns how the client's own class
frequencies change the prediction.

    body, generic head:  FedAvg of  mean_i CE(g(x_i) + gamma log n_k, y_i)
    personal head h_k:   mean_i CE([g(x_i)] + h_k([z_i]), y_i)
    global prediction:   g(x) = head(z),  z = features(x)
    personal prediction: g(x) + h_k(z)

Here n_k are the client's label counts, and no gradient flows through [].

    down:          x
    up:            w_k, n_k
    client keeps:  h_k
    server keeps:  x

The model and the personal head take one step per batch, and their gradients are clipped separately.
The personal head never leaves the client, and does not change x. With gamma = 0, x is FedAvg's, bit
for bit. n_k counts all samples that the client trains on, also samples that a plug-in has drawn. A
class without samples gets no probability. Both losses are cross entropies, whatever the task's
criterion is. A plug-in's own phase trains on the criterion.

Deviations and choices: the paper's hypernetwork for the personal heads is not implemented.

Defaults: gamma = 1, as in the FedDisk paper's comparison. h_k starts from zeros, so the first
personal prediction of a client equals the global prediction. With `init=copy` it starts from the
common initial head.

Reference: Chen and Chao 2022, "On bridging generic and personalized federated learning for image
classification".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedhet.core.authors import (
    AnyTree,
    Batch,
    Client,
    ClientContext,
    Message,
    Method,
    Result,
    RunSetup,
    State,
    Term,
    Tree,
    Workspace,
    serves,
    setting,
    trees,
)
from fedhet.models.base import require_feature_head

HEAD = "fedrod.head"  # prefix of the names of the personal head's parameters in training


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
    return nn.functional.cross_entropy(balanced_logits(logits, counts, gamma), y, reduction="none")


def balanced_logits(logits: Tensor, counts: Tensor, gamma: float) -> Tensor:
    """Return the adjusted logits l_c + gamma log n_c; the loss is their cross entropy."""
    return logits + torch.xlogy(gamma, counts.to(logits.dtype))


class TwoHeadModel(nn.Module):
    """Adds the logits of the model and of the personal head on the same features."""

    def __init__(self, model: nn.Module, personal_head: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.personal_head = personal_head

    def forward(self, x: Tensor) -> Tensor:
        """x (B, ...) -> logits (B, classes)."""
        z = self.model.features(x)  # type: ignore[operator]
        return self.model.head(z) + self.personal_head(z)  # type: ignore[operator]


class FedRODClient(Client):
    """Trains with the balanced softmax, and trains the personal head on the same batches."""

    @serves
    def train(self, msg: Message, state: State, ctx: ClientContext) -> tuple[Result, State]:
        head = {name: nn.Parameter(t) for name, t in self._head(state, ctx).items()}
        counts = torch.bincount(ctx.data.y, minlength=ctx.workspace.task.classes)
        y = ctx.fit(
            msg.weights,
            [Term("penalty", self._personal)],
            loss=Term("loss", self._balanced, {"counts": counts}),
            beside={f"{HEAD}.{name}": p for name, p in head.items()},
        )
        return Result(y.params), {"head": trees.map(Tensor.detach, head)}

    def _balanced(self, params: AnyTree, batch: Batch, own: Tree) -> Tensor:
        # Not `balanced_softmax`: its check of the labels would make each step wait for the device.
        # The check is not needed, because `train` has counted these labels.
        logits = balanced_logits(batch.logits, own["counts"], self.options.gamma)
        return nn.functional.cross_entropy(logits, batch.y, reduction="none")

    def _personal(self, params: AnyTree, batch: Batch, own: Tree) -> Tensor:
        """Return the loss of the personal head; no gradient of it reaches the model."""
        with batch.workspace.autocast():
            z, bias = batch.z.detach(), params.get(f"{HEAD}.bias")
            own_logits = nn.functional.linear(z, params[f"{HEAD}.weight"], bias)
            return nn.functional.cross_entropy(batch.logits.detach() + own_logits, batch.y)

    def _head(self, state: State, ctx: ClientContext) -> Tree:
        """Return the h_k that this client keeps, or the initial h_k if it keeps none."""
        if (kept := state.get("head")) is not None:
            return kept  # type: ignore[no-any-return]
        first = torch.zeros_like if self.options.init == "zeros" else torch.clone
        initial, head = ctx.workspace.initial, ctx.workspace.model.head
        return {name: first(initial[f"head.{name}"]) for name in head.state_dict()}  # type: ignore[operator,union-attr]

    def views(
        self, msg: Message, state: State, ctx: ClientContext
    ) -> dict[str, Callable[[], nn.Module]]:
        def personal() -> nn.Module:
            model = self.personal_module(ctx.model(msg.weights))
            model.personal_head.load_state_dict(self._head(state, ctx))  # type: ignore[operator,union-attr]
            return model

        return {**super().views(msg, state, ctx), "personal": personal}

    @classmethod
    def personal_module(cls, model: nn.Module) -> nn.Module:
        return TwoHeadModel(model, deepcopy(model.head))  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class FedROD(Method):
    """Averages the body and the generic head, as FedAvg does."""

    name = "fedrod"
    client = FedRODClient

    gamma: float = setting(1.0, low=0)
    init: str = setting("zeros", allowed=("zeros", "copy"))

    def evaluates(self, workspace: Workspace) -> dict[str, Sequence[str]]:
        own = [f"personal_{name}" for name in workspace.initial if name.startswith("head.")]
        return {"global": (), "personal": own}

    def setup(self, setup: RunSetup) -> State:
        require_feature_head(
            setup.workspace,
            "method=fedrod",
            "balances the classes of the clients and adds a personal head",
        )
        return {}
