"""SCAFFOLD: control variates correct the drift of local SGD (Karimireddy et al. 2020).

The paper is "SCAFFOLD: Stochastic controlled averaging for federated learning"; this is its
algorithm 1. c_i is the control variate of client i, and c the control variate of the server. Client
i takes K steps from y = x.

    client: y <- y - lr (g(y) - c_i + c)                                       (line 10)
            c_i+ = the gradient of the local loss at x                         (line 12, option I)
            c_i+ = c_i - c + (x - y) / (K lr)                                  (line 12, option II)
    server: x <- x + lr_g sum_i w_i (y_i - x) / sum_i w_i                      (line 17)
            c <- sum_j lambda_j c_j / sum_j lambda_j, over all N clients with data  (line 17)

    down:          x, `scaffold.c`
    up:            y, `scaffold.c_plus`; option I: `scaffold.c_i`; option II: `scaffold.steps` (K)
    client keeps:  c_i, which is 0 before its first participation
    server keeps:  x, the sum of lambda_j c_j, and lambda; with on_lost_state=restart every c_j

In the paper, w_i = 1 and lambda_j = 1, so c is the mean of all c_j. The server's rule is then
c <- c + (1/N) sum_i (c_i+ - c_i), over the participants i.

A plug-in such as FedNorm sets other w_i. Then lambda_j is the weight of client j in its last round,
scaled so that the weights of that round have the mean 1 (lambda_j = R w_j, with R participants and
weights that sum to 1). If the client never took part, lambda_j is 1. With a plain mean of the
control variates, x would return to the fixed point of unweighted SCAFFOLD. Therefore the server
gives the control variates the same weights as the updates. With `control_weights=uniform`, lambda
is always 1.

`control` chooses the option:

- `steps` is option II. It is exact only for plain SGD at a constant rate. The method then refuses
  momentum, weight decay, clipping and Adam. It also refuses plug-ins that change gradients in
  another way than by a term of the loss, such as FedLEx, which scales them. K is the number of
  optimiser steps that the client took.
- `gradient` is option I. It costs one more pass over the data. It allows momentum, weight decay,
  clipping, Adam and plug-ins that change gradients. The client computes the gradient of the local
  loss, with the terms, weights and data that plug-ins add. Plug-ins that scale the gradients of the
  steps do not scale this gradient.

Deviations and choices: in the paper the client sends c_i+ - c_i. Here it sends c_i+, which has the
same size. Under option II the server recovers the difference as -c - (y - x) / (K lr). Under option
I it cannot, so the client also sends c_i. Clients without data never take part and do not count in
N. With `on_lost_state=restart`, a client that has lost c_i begins again with 0. The server then
keeps every c_j, to remove the lost c_i from c; this takes the memory of one model per client.

Defaults: lr_g = 1, as in the paper's experiments, and option II.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fedhet.core.authors import (
    AnyTree,
    Client,
    ClientContext,
    Expected,
    Extras,
    Merged,
    Message,
    Method,
    Result,
    RunSetup,
    State,
    Step,
    Term,
    Tree,
    Update,
    as_given,
    serves,
    setting,
    trees,
)
from fedhet.core.metrics import FORWARD_BATCH


def option_ii(c: AnyTree, dy: AnyTree, steps_lr: float) -> Tree:
    """Return the change c_i+ - c_i = -c - dy / (K lr) of line 12, option II, in float64.

    Args:
        c: the server's control variate.
        dy: y - x, the client's change of the model.
        steps_lr: K lr, for K steps at the rate lr.
    """
    # The quotient is a new tensor, which can be changed in place.
    return {name: (dy[name] / -steps_lr).double().sub_(c[name]) for name in c}


def replaced(u: Update, state: State) -> AnyTree:
    """Return c_i, which the client has replaced by c_i+."""
    if "known" in state:  # on_lost_state=restart: the server keeps every c_j
        return state["known"].get(u.pid) or trees.map(torch.zeros_like, u["c_plus"])
    if "c_i" in u:
        return u["c_i"]  # type: ignore[no-any-return]
    control_change = option_ii(u.sent["c"], u.change, u["steps"] * u.sent.local.lr)
    return trees.add(u["c_plus"], control_change, -1.0)


class ScaffoldClient(Client):
    """Trains by SGD on g - c_i + c, and keeps c_i from one participation to the next."""

    @serves
    def train(self, msg: Message, state: State, ctx: ClientContext) -> tuple[Result, State]:
        c = msg["c"]
        c_i = state.get("c_i") or trees.map(torch.zeros_like, c)
        x, option_2 = msg.weights, self.options.control == "steps"
        if not option_2:
            index = torch.arange(len(ctx.data), device=ctx.workspace.device)
            c_plus = trees.pick(ctx.gradient(x, index, FORWARD_BATCH)[0], c)  # line 12, option I
        y = ctx.fit(x, [Term("gradient", as_given, {name: c[name] - c_i[name] for name in c})])
        if option_2:
            dy = trees.Difference(trees.pick(y.params, c), x)
            control_change = option_ii(c, dy, y.steps * msg.local.lr)
            c_plus = trees.cast(trees.add(c_i, control_change), c)
        extras = {"c_plus": c_plus, **({"steps": y.steps} if option_2 else {"c_i": c_i})}
        return Result(y.params, extras), {"c_i": c_plus}


@dataclass(frozen=True, kw_only=True)
class Scaffold(Method):
    """Averages the changes of the model, and the control variates of all clients.

    The server's state is "total", sum_j lambda_j c_j over all clients, and "lambda", client ->
    lambda_j. lambda_j is 1 for clients that are not in "lambda". With `on_lost_state=restart` the
    state also has "known", client -> c_j. c_j is 0 for clients that are not in "known".
    """

    name = "scaffold"
    client = ScaffoldClient
    breaks = {
        "means": "control variates",
        "weights alone": "control variates",
        "sample weights": "clients count alike",
        "noise": "the noise of all earlier control variates would add up without end",
    }

    lr_g: float = setting(1.0, open_low=0)
    control: str = setting("steps", allowed=("steps", "gradient"))
    control_weights: str = setting("aggregation", allowed=("aggregation", "uniform"))

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"plain steps"} if self.control == "steps" else ())

    def setup(self, setup: RunSetup) -> State:
        workspace = setup.workspace
        return {
            "total": trees.zeros(trees.pick(workspace.initial, workspace.mergeable)),
            "lambda": {},
            **({"known": {}} if setup.on_lost_state == "restart" else {}),
        }

    def broadcast(self, step: Step, state: State) -> Extras:
        clients = sum(map(bool, step.workspace.task.sizes))
        lambdas = clients + sum(factor - 1.0 for factor in state["lambda"].values())
        # c = sum_j lambda_j c_j / sum_j lambda_j
        c = trees.map(lambda total: total / lambdas, state["total"])
        return {"c": trees.cast(c, step.workspace.initial)}

    def expects(self, step: Step) -> dict[str, Expected]:
        workspace = step.workspace
        of_model = Expected(like=trees.pick(workspace.initial, workspace.mergeable))
        if self.control == "gradient":
            return {"c_plus": of_model, "c_i": of_model}
        steps = Expected(low=1, whole=True, exactly=step.steps)
        return {"c_plus": of_model, "steps": steps}

    def weight(self, step: Step, update: Update) -> float:
        return 1.0

    def merge(self, step: Step, state: State, old: Tree, updates: Iterator[Update]) -> Merged:
        dx, added, removed = trees.Sum(), trees.Sum(), trees.Sum()
        w: dict[int, float] = {}
        known = dict(state.get("known", {}))
        for u in updates:
            dx.add(u.change, u.weight)
            w[u.pid] = u.weight if self.control_weights == "aggregation" else 1.0
            added.add(u["c_plus"], w[u.pid])
            removed.add(replaced(u, state), state["lambda"].get(u.pid, 1.0))
            if "known" in state:
                known[u.pid] = u["c_plus"]
        scale = len(w) / sum(w.values())  # R / sum_i w_i
        # line 17: c <- c + 1/N sum_i (c_i+ - c_i) if lambda = 1.
        # The total changes by scale * sum_i w_i c_i+ - sum_i lambda_i c_i. `pop` frees the memory
        # of each tensor at once.
        total = {
            name: total + scale * added.tree.pop(name) - removed.tree.pop(name)
            for name, total in state["total"].items()
        }
        lambdas = state["lambda"] | {pid: scale * weight for pid, weight in w.items()}
        new = trees.add(old, dx.mean(reuse=True), self.lr_g)  # line 17: x <- x + lr_g dx
        after = {"total": total, "lambda": lambdas, "known": known}
        return Merged(new, {name: after[name] for name in state})
