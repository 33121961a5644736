"""FedALA: adaptive local aggregation of the top layers (Zhang et al. 2023).

A client starts its training from a mixture of the received model x and its own last local model
w_k. It learns the weights A_k of this mixture on its own data (algorithm 1):

    start_k = w_k + (x - w_k) A_k    on the top p layers, x below
    A_k <- clip(A_k - eta grad(start_k) (x - w_k), 0, 1)    on s % of the samples, batch by batch

E epochs of local SGD from start_k follow. The server averages as in FedAvg.

    down:          x
    up:            w_k, n_k
    client keeps:  w_k and A_k of the top layers
    server keeps:  x

In its first participation, or while x still equals w_k, a client starts from x. In its next
participation it learns A_k for the first time, starting from ones. This first learning ends when
the standard deviation of the last 10 epochs' losses falls below `threshold`. In every later
participation the client trains A_k for one epoch.

A layer is a module with trained parameters of its own, batch norm included. Layers count in the
model's order. start_k is computed again for each batch. The client learns A_k in train mode and
without plug-ins. Samples and dropout masks come from separate random streams, and the client
discards the batch norm statistics of this learning. With eta = 0 the method is FedAvg, bit for bit.

Every evaluation scores x ("global") and start_k ("personal"). For start_k, a client learns A_k on
the x that is evaluated, in the same way as for training, and discards this A_k afterwards.

Deviations and choices: the first learning takes at most `max_epochs` epochs; the paper has no
limit. The loss of an epoch is the mean loss over its samples.

Defaults: eta = 1, s = 80, p = 1, threshold = 0.1, as in the FedSA paper's comparison and PFLlib.

Reference: Zhang et al. 2023, "FedALA: adaptive local aggregation for personalized federated
learning".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from statistics import pstdev

import torch
from torch import Tensor, nn

from fedhet.core import check
from fedhet.core.authors import (
    AnyTree,
    Client,
    ClientContext,
    Message,
    Method,
    Result,
    State,
    Tree,
    Workspace,
    serves,
    setting,
    trees,
)

WINDOW = 10  # the learning of A ends if the losses of so many epochs hardly vary


def start(
    local: Sequence[Tensor], received: Sequence[Tensor], weights: Sequence[Tensor]
) -> list[Tensor]:
    """Return start = w + (x - w) A: exactly x for A = 1, exactly w for A = 0.

    Args:
        local: w, one tensor for each parameter.
        received: x, in the same order.
        weights: A, in the same order, with entries in [0, 1].
    """
    return list(torch._foreach_lerp(list(local), list(received), list(weights)))


def step(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    local: Sequence[Tensor],
    received: Sequence[Tensor],
    eta: float,
) -> list[Tensor]:
    """Take one gradient step of A, and return clip(A - eta g (x - w), 0, 1).

    Args:
        weights: A.
        grads: g, the gradient of the loss with respect to the model that `start` returns.
        local: w.
        received: x.
        eta: the learning rate of A.
    """
    slope = torch._foreach_sub(list(received), list(local))
    torch._foreach_mul_(slope, list(grads))
    return [a.clamp(0, 1) for a in torch._foreach_sub(list(weights), slope, alpha=eta)]


class Mixing:
    """An optimiser that trains A, and computes the model's parameters from it.

    Args:
        mixed: A, w and x, with one tensor for each parameter. A is changed in place.
        eta: the learning rate of A.
        params: the parameters of the model.
    """

    def __init__(self, mixed: list[list[Tensor]], eta: float, params: list[Tensor]) -> None:
        self.weights, self.local, self.received = mixed
        self.eta = eta
        self.params = params

    def step(self, grads: list[Tensor]) -> None:
        mixed = step(self.weights, grads, self.local, self.received, self.eta)
        torch._foreach_copy_(self.weights, mixed)
        torch._foreach_copy_(self.params, start(self.local, self.received, mixed))


def top(workspace: Workspace, p: int | str) -> list[str]:
    """Return the names of the trained parameters of the last p layers, in the model's order."""
    by_module: dict[str, list[str]] = {}
    for name in workspace.trained:
        by_module.setdefault(name.rpartition(".")[0], []).append(name)
    layers = list(by_module.values())[0 if p == "all" else -int(p) :]
    return [name for layer in layers for name in layer]


def ended(losses: list[float], threshold: float) -> bool:
    """Whether the last WINDOW losses have a standard deviation below the threshold.

    A loss that is not finite also ends the learning, because such losses do not settle.
    """
    return not isfinite(losses[-1]) or (
        len(losses) >= WINDOW and pstdev(losses[-WINDOW:]) < threshold
    )


def mixture(x: AnyTree, w: AnyTree, weights: AnyTree) -> AnyTree:
    """Return x, with start_k in place of the parameters that have weights A."""
    mixed = start(*trees.columns(weights, w, x, weights))
    return {**x, **dict(zip(weights, mixed, strict=True))}


class FedALAClient(Client):
    """Trains from a mixture of its own last model and the received model."""

    @serves
    def train(self, msg: Message, state: State, ctx: ClientContext) -> tuple[Result, State]:
        x, learned = self._start(msg, state, ctx)
        y = ctx.fit(x).params
        return Result(y), {**learned, "w": trees.pick(y, top(ctx.workspace, self.options.p))}

    def views(
        self, msg: Message, state: State, ctx: ClientContext
    ) -> dict[str, Callable[[], nn.Module]]:
        return {
            **super().views(msg, state, ctx),
            # The A_k that is learnt for an evaluation is discarded.
            "personal": lambda: ctx.model(self._start(msg, state, ctx)[0]),
        }

    def _start(self, msg: Message, state: State, ctx: ClientContext) -> tuple[AnyTree, State]:
        """Return start_k, and a state with its A_k; x and {} if there is no A_k yet."""
        x, w, weights = msg.weights, state.get("w"), state.get("A")
        if w is not None and not all(torch.equal(w[name], x[name]) for name in w):
            weights = self._learned(x, w, weights, ctx)
        if w is None or weights is None:
            return x, {}
        return mixture(x, w, weights), {"A": weights}

    def _learned(self, x: AnyTree, w: Tree, weights: Tree | None, ctx: ClientContext) -> Tree:
        """Return A_k, learnt on the received x; `weights` is the client's last A_k, or None."""
        options, n = self.options, len(ctx.own)
        epochs = options.max_epochs if weights is None else 1
        weights = weights or trees.map(torch.ones_like, w)
        drawn = torch.randperm(n, generator=ctx.stream("fedala.samples"))
        ctx.adapt(
            mixture(x, w, weights),
            list(w),
            partial(Mixing, trees.columns(w, weights, w, x), options.eta),
            index=drawn[: max(1, round(n * options.s / 100))],
            epochs=epochs,
            until=partial(ended, threshold=options.threshold),
            stream="fedala",
        )
        return weights


@dataclass(frozen=True, kw_only=True)
class FedALA(Method):
    """Averages the w_k as FedAvg does; a client's A_k never leaves it."""

    name = "fedala"
    client = FedALAClient

    eta: float = setting(1.0, low=0)
    s: float = setting(80.0, open_low=0, high=100)
    p: int | str = 1
    threshold: float = setting(0.1, low=0)
    max_epochs: int = setting(100, low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        check.unless(["all"], check.integer, "method.p", self.p, low=1)

    def evaluates(self, workspace: Workspace) -> dict[str, Sequence[str]]:
        return {"global": (), "personal": top(workspace, self.p)}
