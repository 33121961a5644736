"""SCAFFOLD (Karimireddy et al. 2020, "Stochastic controlled averaging for federated learning").

    y <- y - lr (g(y) - c_i + c)
    c_i+ = c_i - c + (x - y) / (steps lr) (option II, control=steps), or the full local gradient at x (I, control=gradient)
    x <- x + lr_g mean_i (y_i - x)                   c = mean over ALL clients of c_j

    down: x, `scaffold.c`, I: `scaffold.gradient`      up: y, `scaffold.c_plus`, II:
    `scaffold.steps`, I: `scaffold.c_i` client keeps: c_i      server keeps: c, lambda

The paper's client sends c_i+ - c_i; here it sends c_i+, of the same size, and under option II the
server recovers the difference -c - dy / (steps lr); under option I it cannot, and the client sends
c_i as well. That lets controls be averaged under the aggregation's own weights, c = sum_j lambda_j
c_j / sum_j lambda_j with lambda_j = R w_j at client j's last participation and 1 before it: where a
plug-in changes the weights (FedNorm), a plain mean of controls would pull x back to plain
SCAFFOLD's fixed point. Without such a plug-in lambda = 1 and the rule is the paper's.
`control_weights=uniform` keeps lambda = 1 always.

Option II holds for plain SGD at a constant rate only, so momentum, weight decay, clipping and Adam
are refused, and so is FedLEx, which scales the steps. `steps` are the optimiser steps really taken.
Option I costs one more pass over the data and allows them all; its gradient is that of the local
loss as plug-ins shape it, before any hook changes gradients. lr_g 1, as in the paper's experiments.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fedhet import check, trees
from fedhet.client import FedClient
from fedhet.errors import ConfigError
from fedhet.maths.scaffold import control_change, control_sum, correction
from fedhet.messages import Broadcast, Extras, Update
from fedhet.metrics import FORWARD_BATCH
from fedhet.phases import Phase
from fedhet.setting import Setting
from fedhet.strategy import FedStrategy
from fedhet.trees import AnyTree, Tree

CONTROL, GRADIENT, PLUS, STEPS, OWN = (
    "scaffold.c",
    "scaffold.gradient",
    "scaffold.c_plus",
    "scaffold.steps",
    "scaffold.c_i",
)


class ScaffoldClient(FedClient):
    """SGD on g - c_i + c; keeps c_i from one participation to the next."""

    _shift: list[Tensor] | None = None  # c - c_i; none where a plug-in trains in a phase of its own

    def train(self, msg: Broadcast) -> Update:
        c = msg.tree(CONTROL)
        c_i = self.state.get(OWN) or trees.map(torch.zeros_like, c)
        self._shift = [correction(c[name], c_i[name]) for name in c]
        self._positions = [self.site.trained.index(name) for name in c]
        at_x = self._gradient_at(msg) if msg.extras.get(GRADIENT) else None
        update = super().train(msg)
        if at_x is not None:
            c_plus, update.extras[OWN] = trees.pick(at_x, c), c_i
        else:
            change, steps_lr = (
                trees.Difference(trees.pick(update.weights, c), msg.weights),
                self.steps * self.local.lr,
            )
            c_plus = trees.cast(
                {
                    name: (
                        c_i[name].double()
                        + control_change(c[name].double(), change[name], steps_lr)
                    )
                    for name in c
                },
                c,
            )
            update.extras[STEPS] = self.steps
        update.extras[PLUS] = c_plus
        self.state.put(OWN, c_plus)
        return update

    def _gradient_at(self, msg: Broadcast) -> Tree:
        """Over all training samples, at the received weights; the training that follows loads those
        again."""
        model = self.site.load(self.start(msg))
        index = torch.arange(len(self.data), device=self.site.device)
        return dict(
            zip(
                self.site.trained,
                self.full_gradient(model, self.data, index, FORWARD_BATCH),
                strict=True,
            )
        )

    def gradient(self, grads: list[Tensor]) -> None:
        if self._shift is not None:
            torch._foreach_add_([grads[i] for i in self._positions], self._shift)


class Scaffold(FedStrategy):
    """x and the controls are averaged under the same weights."""

    name = "scaffold"
    client_cls = ScaffoldClient

    def __init__(
        self,
        setting: Setting,
        *,
        lr_g: float = 1.0,
        control: str = "steps",
        control_weights: str = "aggregation",
    ) -> None:
        self.lr_g = check.number("method.lr_g", lr_g, open_low=0)
        self.control = check.one_of("method.control", control, ("steps", "gradient"))
        self.control_weights = check.one_of(
            "method.control_weights", control_weights, ("aggregation", "uniform")
        )
        for key, plain in (
            ("optimizer", "sgd"),
            ("momentum", 0),
            ("weight_decay", 0),
            ("clip", None),
        ):
            if self.control == "steps" and getattr(setting.local, key) != plain:
                raise ConfigError(
                    f"client.{key}={getattr(setting.local, key)}: method=scaffold needs plain SGD"
                    f" (client.{key}={plain}), because its control variates are recovered from the"
                    " steps taken; method.control=gradient does not"
                )
        super().__init__(setting)
        shared = [name for name in self.site.trained if name in self.site.shared]
        self._like = trees.pick(self.site.initial, shared)
        self._total = trees.zeros(self._like)  # A = sum_j lambda_j c_j
        # lambda_j of the clients that have taken part; 1 for the others
        self._share: dict[int, float] = {}
        self._sent: Tree

    @property
    def refuses(self) -> dict[str, str]:
        reason = (
            "its mask scales the steps from which method.control=steps recovers the control"
            " variates; use method.control=gradient"
        )
        return {"fedlex": reason} if self.control == "steps" else {}

    def base_weight(self, update: Update) -> float:
        return 1.0

    def cohort_extras(self, phase: Phase, step: int, cohort: list[int]) -> Extras:
        clients = len(self.sizes) + sum(share - 1.0 for share in self._share.values())
        self._sent = trees.cast(trees.map(lambda a: a / clients, self._total), self._like)
        return (
            {CONTROL: self._sent, GRADIENT: True}
            if self.control == "gradient"
            else {CONTROL: self._sent}
        )

    def check(self, update: Update) -> None:
        update.tree(PLUS, self._like)
        if self.control == "gradient":
            update.tree(OWN, self._like)
        else:
            update.integer(STEPS, low=1)

    def merge(self, updates: Iterator[Update], old: Tree) -> Tree:
        dy, new, gone = trees.Sum(), trees.Sum(), trees.Sum()
        weights: dict[int, float] = {}
        for update in updates:
            change, plus = update.change, update.tree(PLUS, self._like)
            weights[update.pid] = update.weight if self.control_weights == "aggregation" else 1.0
            dy.add(change, update.weight)
            new.add(plus, weights[update.pid])
            gone.add(self._before(update, change, plus), self._share.get(update.pid, 1.0))
        scale = len(weights) / sum(weights.values())  # lambda_i = R w_i with weights of sum 1
        for name in self._total:
            self._total[name] = control_sum(
                self._total[name], [scale], [new.tree[name]], [1.0], [gone.tree[name]]
            )
        self._share |= {pid: scale * weight for pid, weight in weights.items()}
        return trees.add(old, dy.mean(reuse=True), self.lr_g)

    def _before(self, update: Update, change: AnyTree, plus: Tree) -> Tree:
        """c_i, which the client has just replaced by c_i+."""
        if self.control == "gradient":
            return update.tree(OWN, self._like)
        steps_lr = update.scalar(STEPS) * self.local.lr
        return {
            name: (
                plus[name].double()
                - control_change(self._sent[name].double(), change[name], steps_lr)
            )
            for name in self._like
        }
