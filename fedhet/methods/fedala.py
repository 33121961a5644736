"""FedALA: adaptive local aggregation of the top layers (Zhang et al. 2023).

A client starts its training from a mixture of the received model and its own last local model w_k,
with weights A_k that it learns on its own data (algorithm 1):

    start_k = w_k + (x - w_k) A_k    on the top p layers, x below
    A_k <- clip(A_k - eta grad(start_k) (x - w_k), 0, 1)    on s % of the samples, batch by batch

E epochs of local SGD from start_k follow; the server is FedAvg's.

    down:          x, `fedala.*` (the options)
    up:            w_k, n_k
    client keeps:  w_k and A_k of the top layers
    server keeps:  x

In its first participation, or while x still equals w_k, a client starts from x. In the next one it
learns A_k, from ones, until the standard deviation of the last 10 epochs' losses falls below
`threshold`; afterwards it takes one epoch each time. A layer is a module with trained parameters of
its own, batch norm included; layers count in the model's order. start_k is formed anew for each
batch. A_k is learnt in train mode, without plug-ins, on samples and dropout masks from separate
random streams; the batch norm statistics that this leaves behind are discarded. With eta = 0 the
method is FedAvg, bit for bit.

Evaluated are x ("global") and start_k ("personal"). For the latter a client learns A_k on the x to
be scored, as it would in order to train, and forgets it afterwards.

Deviations and choices: at most `max_epochs` epochs, where the paper has no limit; the loss of an
epoch is its mean.

Defaults: eta = 1, s = 80, p = 1, threshold = 0.1, as in the FedSA paper's comparison and PFLlib.

Reference: Zhang et al. 2023, "FedALA: adaptive local aggregation for personalized federated
learning".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from statistics import pstdev

import torch
from torch import Tensor, nn

from fedhet.core import check
from fedhet.core.client import FedClient
from fedhet.core.descent import descend
from fedhet.core.errors import ConfigError
from fedhet.core.messages import Broadcast, Extras, Update
from fedhet.core.phases import Phase
from fedhet.core.setting import Setting
from fedhet.core.strategy import FedStrategy
from fedhet.core.trees import AnyTree
from fedhet.core.workspace import Workspace

ETA = "fedala.eta"
PERCENTAGE = "fedala.s"
LAYERS = "fedala.layers"
THRESHOLD = "fedala.threshold"
EPOCHS = "fedala.max_epochs"
LOCAL = "fedala.w"  # client state: w_k
WEIGHTS = "fedala.A"  # client state: A_k
WINDOW = 10  # the number of epochs whose losses must have settled


def start(
    local: Sequence[Tensor], received: Sequence[Tensor], weights: Sequence[Tensor]
) -> list[Tensor]:
    """Return start = w + (x - w) A: exactly x where A = 1, exactly w where A = 0.

    Args:
        local: w, a tensor for each parameter, as all lists here.
        received: x.
        weights: A, with entries in [0, 1].
    """
    return list(torch._foreach_lerp(list(local), list(received), list(weights)))


def step(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    local: Sequence[Tensor],
    received: Sequence[Tensor],
    eta: float,
) -> list[Tensor]:
    """Return A <- clip(A - eta g (x - w), 0, 1), one gradient step.

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
    """Steps of A, from which the parameters are computed."""

    def __init__(
        self,
        params: list[Tensor],
        weights: list[Tensor],
        local: list[Tensor],
        received: list[Tensor],
        eta: float,
    ) -> None:
        self.params = params
        self.weights = weights
        self.local = local
        self.received = received
        self.eta = eta

    def step(self, grads: list[Tensor]) -> None:
        mixed = step(self.weights, grads, self.local, self.received, self.eta)
        torch._foreach_copy_(self.weights, mixed)
        torch._foreach_copy_(self.params, start(self.local, self.received, mixed))


def layers(workspace: Workspace) -> list[list[str]]:
    """The names of the trained parameters, by the module that holds them, in the model's order."""
    by_module: dict[str, list[str]] = {}
    for name in workspace.trained:
        by_module.setdefault(name.rpartition(".")[0], []).append(name)
    return list(by_module.values())


def settled(losses: list[float], threshold: float) -> bool:
    """Whether the last WINDOW losses have a standard deviation below the threshold."""
    return len(losses) >= WINDOW and pstdev(losses[-WINDOW:]) < threshold


class FedALAClient(FedClient):
    """Starts its top layers between its own last model and the received one."""

    def train(self, msg: Broadcast) -> Update:
        self._learn_weights(msg)
        update = super().train(msg)
        self.state.put(LOCAL, self.workspace.read(self._top(msg)))
        return update

    def start(self, msg: Broadcast) -> AnyTree:
        received = self.received_weights(msg)
        local = self.state.get(LOCAL)
        weights = self.state.get(WEIGHTS)
        if local is None or weights is None:
            return received
        mixed = start(
            [local[name] for name in weights],
            [received[name] for name in weights],
            list(weights.values()),
        )
        return {**received, **dict(zip(weights, mixed, strict=True))}

    def views(self, msg: Broadcast) -> dict[str, Callable[[], nn.Module]]:
        return {**super().views(msg), "personal": lambda: self._start_model(msg)}

    def _start_model(self, msg: Broadcast) -> nn.Module:
        """The model start_k that this client would train from."""
        self._learn_weights(msg)  # an evaluation never commits the state
        return self.workspace.load(self.start(msg))

    def _top(self, msg: Broadcast) -> list[str]:
        """The names of the trained parameters of the top layers."""
        count = msg.integer(LAYERS, low=1)
        return [name for layer in layers(self.workspace)[-count:] for name in layer]

    def _learn_weights(self, msg: Broadcast) -> None:
        """Adapt A_k, which the state keeps, to the received weights.

        The model that this leaves behind is overwritten by the next load.
        """
        local = self.state.get(LOCAL)
        top = self._top(msg)
        if local is None or all(torch.equal(local[name], msg.weights[name]) for name in top):
            return
        weights = self.state.get(WEIGHTS)
        if weights is None:
            weights = {name: torch.ones_like(local[name]) for name in top}
            epochs = msg.epochs(EPOCHS, low=1)
        else:
            epochs = 1
        with self.workspace.seeded("fedala", msg.phase, msg.step, msg.pid):
            learned = self._adapted(
                msg,
                [weights[name] for name in top],
                [local[name] for name in top],
                [msg.weights[name] for name in top],
                epochs,
            )
        self.state.put(WEIGHTS, dict(zip(top, learned, strict=True)))

    def _adapted(
        self,
        msg: Broadcast,
        weights: list[Tensor],
        local: list[Tensor],
        received: list[Tensor],
        epochs: int,
    ) -> list[Tensor]:
        """A_k after at most `epochs` epochs over the drawn samples.

        All lists hold one tensor per top parameter.
        """
        model = self.workspace.load(self.start(msg))
        data = self.workspace.train_data(self.pid)
        descent = self.descent(model, data, hooks=False)
        descent.clip = None
        descent.params = {name: descent.params[name] for name in self._top(msg)}
        weights = [a.clone() for a in weights]
        in_order = list(descent.params.values())
        descent.optimizer = Mixing(in_order, weights, local, received, msg.scalar(ETA))
        index = self._drawn_samples(msg, len(data))
        index = index[: self.train_mode(model, len(index), self.local.batch_size)]
        losses: list[float] = []
        for _ in range(epochs):
            losses.append(float(descend(descent, [index], self.workspace.performer)) / len(index))
            if not isfinite(losses[-1]) or settled(losses, msg.scalar(THRESHOLD)):
                break
        return weights

    def _drawn_samples(self, msg: Broadcast, n: int) -> Tensor:
        """The positions of s % of n samples, drawn afresh for each message."""
        count = max(1, round(n * msg.scalar(PERCENTAGE) / 100))
        order = torch.randperm(n, generator=self.generator("fedala.samples"))
        return order[:count].to(self.workspace.device)


class FedALA(FedStrategy):
    """FedAvg of the w_k; how a client mixes them with x never leaves it."""

    name = "fedala"
    client_cls = FedALAClient
    evaluates = ("global", "personal")

    def __init__(
        self,
        setting: Setting,
        *,
        eta: float = 1.0,
        s: float = 80.0,
        p: int | str = 1,
        threshold: float = 0.1,
        max_epochs: int = 100,
    ) -> None:
        self.eta = check.number("method.eta", eta, low=0)
        self.s = check.number("method.s", s, open_low=0, high=100)
        self.p = p if p == "all" else _layer_count("method.p", p)
        self.threshold = check.number("method.threshold", threshold, low=0)
        self.max_epochs = check.integer("method.max_epochs", max_epochs, low=1)
        super().__init__(setting)

    def setup(self) -> None:
        all_layers = layers(self.workspace)
        top = len(all_layers) if self.p == "all" else int(self.p)
        self.personal_names = [name for layer in all_layers[-top:] for name in layer]
        self.evaluation_extras = {
            ETA: self.eta,
            PERCENTAGE: self.s,
            LAYERS: top,
            THRESHOLD: self.threshold,
            EPOCHS: self.max_epochs,
        }

    def cohort_extras(self, phase: Phase, step: int, cohort: list[int]) -> Extras:
        return self.evaluation_extras  # A_k is learnt both for training and for evaluation


def _layer_count(name: str, value: object) -> int:
    """A whole number >= 1; the error message also offers "all"."""
    try:
        return check.integer(name, value, low=1)
    except ConfigError as error:
        raise ConfigError(f"{error}, or all") from error
