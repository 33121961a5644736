"""FedALA (Zhang et al. 2023, "FedALA: adaptive local aggregation for personalized federated
learning", algorithm 1).

    start_k = w_k + (x - w_k) A_k on the top p layers, x below, with w_k the client's own last local
    model A_k <- clip(A_k - eta grad(start_k) (x - w_k), 0, 1) on s % of the local data, start_k
    formed anew for each batch then E epochs of local SGD from start_k; the server as in FedAvg

    down: x, `fedala.*` (the options)      up: w_k, n_k      client keeps: w_k and A_k of the top layers      server keeps: x

In its first participation, or while x is still w_k, a client starts from x. The next one learns
A_k, from ones, until the standard deviation of the last 10 epochs' losses is below `threshold`;
later ones take one epoch. A layer is a module with trained parameters of its own, batch norm
included; layers count in the model's order. A_k is learnt in train mode, without plug-ins, on
samples and dropout masks from streams of its own; the batch norm statistics that this leaves are
discarded.

Evaluated are x ("global") and start_k ("personal"), for which a client learns A_k on the x that it
is to be scored with, as it would to train, and forgets it. Deviations: at most `max_epochs` epochs
(the paper has no limit); an epoch's loss is its mean. Defaults eta 1, s 80, p 1, threshold .1, as
in FedSA's comparison and PFLlib. eta = 0 is FedAvg, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from statistics import pstdev
from typing import Any

import torch
from torch import Tensor, nn

from fedhet import check
from fedhet.client import FedClient
from fedhet.errors import ConfigError
from fedhet.maths import fedala
from fedhet.messages import Broadcast, Extras, Update
from fedhet.phases import Phase
from fedhet.setting import Setting
from fedhet.site import Site
from fedhet.strategy import FedStrategy
from fedhet.training import derivative
from fedhet.trees import AnyTree

ETA, SHARE, LAYERS, THRESHOLD, EPOCHS = (
    f"fedala.{name}" for name in ("eta", "s", "layers", "threshold", "max_epochs")
)
LOCAL, WEIGHTS = "fedala.w", "fedala.A"
WINDOW = 10  # epochs whose losses must have settled


def layers(site: Site) -> list[list[str]]:
    """The names of the trained parameters, by the module that holds them, in the model's order."""
    found: dict[str, list[str]] = {}
    for name in site.trained:
        found.setdefault(name.rpartition(".")[0], []).append(name)
    return list(found.values())


class FedALAClient(FedClient):
    """Starts its top layers between its own last model and the received one."""

    def train(self, msg: Broadcast) -> Update:
        self._learn(msg)
        update = super().train(msg)
        self.state.put(LOCAL, self.site.read(self._top(msg)))
        return update

    def start(self, msg: Broadcast) -> AnyTree:
        received, local, weights = (
            super().start(msg),
            self.state.get(LOCAL),
            self.state.get(WEIGHTS),
        )
        if local is None or weights is None:
            return received
        mixed = fedala.start(
            *([tree[name] for name in weights] for tree in (local, received, weights))
        )
        return {**received, **dict(zip(weights, mixed, strict=True))}

    def views(self, msg: Broadcast) -> dict[str, Callable[[], nn.Module]]:
        return {
            "global": lambda: self.site.load(super(FedALAClient, self).start(msg)),
            "personal": lambda: self._personal(msg),
        }

    def _personal(self, msg: Broadcast) -> nn.Module:
        self._learn(msg)  # what an evaluation puts into the state is never committed
        return self.site.load(self.start(msg))

    def _top(self, msg: Broadcast) -> list[str]:
        count = msg.integer(LAYERS)
        return [name for layer in layers(self.site)[-count:] for name in layer]

    def _learn(self, msg: Broadcast) -> None:
        """Adapt A_k to the received weights, in the state; the model that this leaves behind is
        overwritten by the next load."""
        local, known, top = self.state.get(LOCAL), self.state.get(WEIGHTS), self._top(msg)
        if local is None or all(torch.equal(local[name], msg.weights[name]) for name in top):
            return
        own, received = ([tree[name] for name in top] for tree in (local, msg.weights))
        weights = [
            torch.ones_like(t) if known is None else known[name]
            for name, t in zip(top, own, strict=True)
        ]
        with self.site.seeded("fedala", msg.phase, msg.step, msg.pid):
            learned = self._adapted(msg, weights, own, received, settle=known is None)
        self.state.put(WEIGHTS, dict(zip(top, learned, strict=True)))

    def _adapted(
        self,
        msg: Broadcast,
        weights: list[Tensor],
        local: list[Tensor],
        received: list[Tensor],
        settle: bool,
    ) -> list[Tensor]:
        """A_k after one epoch over the drawn samples, or after as many as it takes to settle."""
        said: Mapping[str, Any] = msg.extras
        model, data = self.site.load(self.start(msg)), self.site.train_data(self.pid)
        params: list[Tensor] = [p for name, p in model.named_parameters() if name in self._top(msg)]
        draws = self.generator("fedala.samples")
        index = torch.randperm(len(data), generator=draws)[
            : max(1, round(len(data) * said[SHARE] / 100))
        ].to(self.site.device)
        index = index[: self.train_mode(model, len(index), self.local.batch_size)]
        objective = self.objective(model, data, hooks=False)
        losses: list[float] = []
        for _ in range(said[EPOCHS] if settle else 1):
            total = torch.zeros((), dtype=torch.float64, device=self.site.device)
            for part in index.split(self.local.batch_size):
                loss, penalty = objective(data.x[part], data.y[part], part)
                grads = derivative(loss, penalty, params)
                with torch.no_grad():
                    weights = fedala.step(weights, grads, local, received, said[ETA])
                    torch._foreach_copy_(params, fedala.start(local, received, weights))
                    total += loss.sum()
            losses.append(float(total) / len(index))
            if not isfinite(losses[-1]) or (
                len(losses) >= WINDOW and pstdev(losses[-WINDOW:]) < said[THRESHOLD]
            ):
                break
        return weights


class FedALA(FedStrategy):
    """FedAvg of the w_k; how each client mixes them with x stays with it."""

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
        self.p = len(layers(setting.site)) if p == "all" else _count("method.p", p)
        self.threshold = check.number("method.threshold", threshold, low=0)
        self.max_epochs = check.integer("method.max_epochs", max_epochs, low=1)
        self._options: Extras = {
            ETA: self.eta,
            SHARE: self.s,
            LAYERS: self.p,
            THRESHOLD: self.threshold,
            EPOCHS: self.max_epochs,
        }
        super().__init__(setting)

    def setup(self) -> None:
        self.evaluation_extras = self._options

    def cohort_extras(self, phase: Phase, step: int, cohort: list[int]) -> Extras:
        return self.evaluation_extras


def _count(name: str, value: object) -> int:
    try:
        return check.integer(name, value, low=1)
    except ConfigError as error:
        raise ConfigError(f"{error}, or all") from error
