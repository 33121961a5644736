"""SCAFFOLD: control variates correct the drift of local SGD (Karimireddy et al. 2020).

The paper is "SCAFFOLD: Stochastic controlled averaging for federated learning"; this is its
algorithm 1. Client i takes K steps from y = x.

    client: y <- y - lr (g(y) - c_i + c)                                       (line 10)
            c_i+ = the gradient of the local loss at x                         (line 12, option I)
            c_i+ = c_i - c + (x - y) / (K lr)                                  (line 12, option II)
    server: x <- x + lr_g sum_i w_i (y_i - x) / sum_i w_i                      (line 17)
            c <- sum_j lambda_j c_j / sum_j lambda_j, over all N clients       (line 17)

    down:          x, `scaffold.c`; option I: `scaffold.gradient`
    up:            y, `scaffold.c_plus`; option I: `scaffold.c_i`; option II: `scaffold.steps` (K)
    client keeps:  c_i, which is 0 before its first participation
    server keeps:  x, the sum of lambda_j c_j, and lambda

In the paper, w_i = 1 and lambda_j = 1, and c is the mean of all c_j: the server's rule is then
c <- c + (1/N) sum_i (c_i+ - c_i), over the participants i.

A plug-in such as FedNorm sets other w_i. Then lambda_j = R w_j, from the last round in which client
j took part (R participants, weights w scaled to sum to 1); 1 if it never did. A plain mean of the
control variates would pull x back to the fixed point of unweighted SCAFFOLD, so they are averaged
under the same weights as the updates. `control_weights=uniform` keeps lambda = 1 always.

`control` chooses the option:

- `steps` is option II. It is exact for plain SGD at a constant rate only: momentum, weight decay,
  clipping and Adam are refused, and so are plug-ins that change gradients otherwise than by a term
  of the loss, such as FedLEx, which scales them. K is the number of optimiser steps that the client
  has really taken.
- `gradient` is option I. It costs one more pass over the data and allows all of these. The gradient
  is that of the local loss with the terms, weights and data that plug-ins add, before any hook
  changes gradients.

Deviations and choices: its client sends c_i+ - c_i. Here it sends c_i+, which has the same size.
Under option II the server recovers the difference as -c - (y - x) / (K lr); under option I it
cannot, and the client sends c_i as well.

Defaults: lr_g = 1, as in the paper's experiments, and option II.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fedhet.core import check, trees
from fedhet.core.admission import check_steps
from fedhet.core.client import FedClient
from fedhet.core.messages import Broadcast, Extras, Update
from fedhet.core.metrics import FORWARD_BATCH
from fedhet.core.phases import Phase
from fedhet.core.setting import Setting
from fedhet.core.strategy import FedStrategy
from fedhet.core.trees import AnyTree, Prepared, Tree

CONTROL = "scaffold.c"  # extra down: c
GRADIENT = "scaffold.gradient"  # extra down: true under option I
PLUS = "scaffold.c_plus"  # extra up: c_i+
STEPS = "scaffold.steps"  # extra up under option II: K
OWN = "scaffold.c_i"  # extra up under option I, and the client's state: c_i
WEIGHTS = ("aggregation", "uniform")  # of the mean of the control variates


class ScaffoldClient(FedClient):
    """Trains by SGD on g - c_i + c, and keeps c_i from one participation to the next."""

    def train(self, msg: Broadcast) -> Update:
        c, c_i = controls(self, msg)
        if GRADIENT in msg.extras:
            c_plus = trees.pick(local_gradient(self, msg), c)
            update = super().train(msg)
            update.extras[OWN] = c_i
        else:
            update = super().train(msg)
            dy = trees.Difference(trees.pick(update.weights, c), msg.weights)
            c_plus = trees.cast(trees.add(c_i, option_ii(c, dy, self.steps * self.local.lr)), c)
            update.extras[STEPS] = self.steps
        update.extras[PLUS] = c_plus
        self.state.put(OWN, c_plus)
        return update

    def prepare(self, msg: Broadcast) -> Tree:
        c, c_i = controls(self, msg)
        return {name: c[name] - c_i[name] for name in c}

    def gradient(self, grads: Tree, params: AnyTree, own: Prepared) -> None:
        if own:
            torch._foreach_add_(*trees.columns(own, grads, own))


class Scaffold(FedStrategy):
    """Averages the changes of the model, and the control variates of all clients beside them."""

    name = "scaffold"
    client_cls = ScaffoldClient
    memory = ("_controls",)
    enters = "control variates"
    otherwise = {"plain_steps": "method.control=gradient"}
    refuses_noise = "the noise of all earlier control variates would add up without end"

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
        self.control_weights = check.one_of("method.control_weights", control_weights, WEIGHTS)
        self.plain_steps = self.counts_steps = control == "steps"
        super().__init__(setting)

    def setup(self) -> None:
        like = trees.pick(self.workspace.initial, self.workspace.mergeable)
        self._controls = ControlVariates(like, len(self.sizes), self.control, self.control_weights)

    def base_weight(self, update: Update) -> float:
        return 1.0

    def cohort_extras(self, phase: Phase, step: int, cohort: list[int]) -> Extras:
        return self._controls.begin_step()

    def check(self, update: Update) -> None:
        self._controls.check(update, self)

    def merge(self, updates: Iterator[Update], old: Tree) -> Tree:
        dx = trees.Sum()
        for update in updates:
            dx.add(update.change, update.weight)
            self._controls.add_participant(update, self.local.lr)
        self._controls.update_sum()  # line 17: c <- c + 1/N sum_i (c_i+ - c_i), where lambda = 1
        return trees.add(old, dx.mean(reuse=True), self.lr_g)  # line 17: x <- x + lr_g dx


class ControlVariates:
    """The server's account of the clients' control variates.

    The server does not hold the c_j. It keeps sum_j lambda_j c_j over all clients, and puts each
    participant's c_i+ in the place of its c_i.

    Args:
        like: the tensors that a control variate consists of, for their shapes and dtypes.
        clients: the number N of all clients.
        control: the option `method.control`.
        weights: the option `method.control_weights`.
    """

    memory = ("_total", "_lambda")

    def __init__(self, like: Tree, clients: int, control: str, weights: str) -> None:
        self._like = like
        self._clients = clients
        self._control = control
        self._weights = weights
        self._total = trees.zeros(like)  # sum_j lambda_j c_j
        self._lambda: dict[int, float] = {}  # j -> lambda_j; 1 for the clients that are not in it

    def begin_step(self) -> Extras:
        """Begin a step, and return what its participants receive."""
        lambdas = self._clients + sum(factor - 1.0 for factor in self._lambda.values())
        # c = sum_j lambda_j c_j / sum_j lambda_j
        self._c = trees.cast(trees.map(lambda total: total / lambdas, self._total), self._like)
        self._added = trees.Sum()  # sum_i w_i c_i+, over the participants so far
        self._removed = trees.Sum()  # sum_i lambda_i c_i, with lambda_i from before this step
        self._participants: dict[int, float] = {}  # client i -> w_i in this step
        if self._control == "gradient":
            return {CONTROL: self._c, GRADIENT: True}
        return {CONTROL: self._c}

    def check(self, update: Update, method: FedStrategy) -> None:
        """Raise ValueError where the update does not have what `add_participant` needs."""
        update.tree(PLUS, self._like)
        if self._control == "gradient":
            update.tree(OWN, self._like)
        else:
            check_steps(method, update, STEPS, low=1)

    def add_participant(self, update: Update, lr: float) -> None:
        """Record that the client's c_i+ replaces its c_i; `update_sum` puts it into effect."""
        weight = update.weight if self._weights == "aggregation" else 1.0
        self._participants[update.pid] = weight
        self._added.add(update.tree(PLUS), weight)
        if self._control == "gradient":
            c_i = update.tree(OWN)
        else:  # c_i = c_i+ - (c_i+ - c_i)
            moved = option_ii(self._c, update.change, update.integer(STEPS) * lr)
            c_i = trees.add(update.tree(PLUS), moved, -1.0)
        self._removed.add(c_i, self._lambda.get(update.pid, 1.0))

    def update_sum(self) -> None:
        """End a step: total <- total + sum_i (R w_i c_i+ - lambda_i c_i), lambda_i <- R w_i.

        R is the number of participants, and w is scaled to sum to 1.
        """
        weights = self._participants
        scale = len(weights) / sum(weights.values())  # R / sum_i w_i
        added = self._added.tree
        removed = self._removed.tree
        for name, total in self._total.items():
            self._total[name] = total + scale * added[name] - removed[name]
        self._lambda |= {pid: scale * weight for pid, weight in weights.items()}


def option_ii(c: Tree, dy: AnyTree, steps_lr: float) -> Tree:
    """The change c_i+ - c_i = -c - dy / (K lr) of line 12, option II, in float64.

    Args:
        c: the server's control variate.
        dy: y - x, by which the client has changed the model.
        steps_lr: K lr, for K steps at the rate lr.
    """
    return {name: dy[name] / -steps_lr - c[name].double() for name in c}


def controls(client: FedClient, msg: Broadcast) -> tuple[Tree, Tree]:
    """c and c_i, as they are before the training."""
    c = msg.tree(CONTROL)
    return c, client.state.get(OWN) or trees.map(torch.zeros_like, c)


def local_gradient(client: FedClient, msg: Broadcast) -> Tree:
    """The gradient of the local loss over all training samples, at the received weights.

    It uses the workspace's model, which the training that follows loads anew.
    """
    model = client.workspace.load(client.start(msg))
    index = torch.arange(len(client.data), device=client.workspace.device)
    return client.full_gradient(model, client.data, index, FORWARD_BATCH)
