"""SGDM: momentum SGD on the clients; the server also averages the momenta (Liu et al. 2020).

The paper is "Accelerating federated learning via momentum gradient descent".

    client: d <- gamma d + g(w)                                            (eq. 4)
            w <- w - lr d, from w = x and the received d                   (eq. 5)
    server: x <- sum_k p_k w_k,  p_k = n_k / sum_j n_j
            d <- sum_k p_k d_k

    down:          x, `sgdm.d`
    up:            w_k, n_k, `sgdm.d` (d_k)
    client keeps:  nothing
    server keeps:  x, d (0 at first)

This is the heavy ball method without dampening. A client starts from the server's current d, even
if it did not take part in the last round. With one client the method is the centralised heavy ball.
Both means use the same weights: n_k, or the weights that a plug-in such as FedNorm sets. Weight
decay is added to g. client.momentum must be 0, because gamma is the momentum, and the client's
optimiser must be SGD.

Options: `momentum_state=reset` starts every client from d = 0 and sends no d. This is FedAvg with
client.momentum=gamma. The default is `averaged`.

Default: gamma = 0.9. This value is neither from the paper nor from papers that compare with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from fedhet.core.authors import (
    Client,
    ClientContext,
    ConfigError,
    Expected,
    Extras,
    LocalSettings,
    Merged,
    Message,
    Method,
    Result,
    RunSetup,
    State,
    Step,
    Tree,
    Update,
    serves,
    setting,
    trees,
)


class SGDMClient(Client):
    """Trains by SGD with momentum gamma, from the received d, or from 0 if it received none."""

    @serves
    def train(self, msg: Message, state: State, ctx: ClientContext) -> tuple[Result, State]:
        averaged = "d" in msg
        w = ctx.fit(msg.weights, momentum=msg["d"] if averaged else None)
        return Result(w.params, {"d": w.momentum} if averaged else {}), state


@dataclass(frozen=True, kw_only=True)
class SGDM(Method):
    """Averages the clients' weights and momenta.

    The server's state is "d"; it is empty with momentum_state=reset.
    """

    name = "sgdm"
    client = SGDMClient

    gamma: float = setting(0.9, low=0, open_high=1)
    momentum_state: str = setting("averaged", allowed=("averaged", "reset"))

    @property
    def breaks(self) -> Mapping[str, str]:
        return {"weights alone": "momenta"} if self.momentum_state == "averaged" else {}

    def local(self, local: LocalSettings) -> LocalSettings:
        if local.optimizer != "sgd" or local.momentum:
            raise ConfigError(
                f"client.optimizer={local.optimizer}, client.momentum={local.momentum}: method=sgdm"
                " is SGD with its own momentum; use client=sgd and client.momentum=0, and set the"
                " momentum by method.gamma"
            )
        return replace(local, momentum=self.gamma)

    def setup(self, setup: RunSetup) -> State:
        d = trees.pick(setup.workspace.initial, setup.workspace.trained)
        return {"d": trees.zeros(d)} if self.momentum_state == "averaged" else {}

    def broadcast(self, step: Step, state: State) -> Extras:
        return {name: trees.cast(d, step.workspace.initial) for name, d in state.items()}

    def expects(self, step: Step) -> dict[str, Expected]:
        d = Expected(like=trees.pick(step.workspace.initial, step.workspace.trained))
        return {"d": d} if self.momentum_state == "averaged" else {}

    def merge(self, step: Step, state: State, old: Tree, updates: Iterator[Update]) -> Merged:
        change, d = step.average(), step.average()
        for u in updates:
            change.add(u.change, u.weight)
            if "d" in u:
                d.add(u["d"], u.weight)
        new = trees.add(change.mean(reuse=True), old)
        return Merged(new, {"d": d.mean(reuse=True)} if state else state)
