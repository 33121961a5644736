"""Ditto: each client also trains a personal model, kept close to the global one (Li et al. 2021).

FedAvg trains the global model x. In addition, each participant trains a personal model v_k
(algorithm 1):

    v_k <- v_k - lr (g_k(v_k) + lam (v_k - x_t))    for `plocal_epochs` epochs

Here x_t is the model that the client received in this round.

    down:          x
    up:            w_k, n_k
    client keeps:  v_k, buffers included
    server keeps:  x

v_k starts from the common initial model. A client that has never taken part is evaluated with that
initial model. The client trains v_k after w_k, on the same batches and without plug-ins. This
training has its own optimiser, random draws and batch norm statistics, so x is FedAvg's, bit for
bit. With lam = 0 the training of v_k is purely local.

The paper leaves open how the global problem is solved. Here FedAvg solves it, weighted by n_k.

Defaults: lam = 1 (the paper tunes lam from `0.05` to 2), and one epoch.

Reference: Li et al. 2021, "Ditto: fair and robust federated learning through personalization".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from fedhet.core.authors import (
    Client,
    ClientContext,
    Message,
    Method,
    Result,
    State,
    Term,
    Tree,
    Workspace,
    serves,
    setting,
    trees,
)
from fedhet.core.check import MOST_EPOCHS
from fedhet.methods.fedprox import away


class DittoClient(Client):
    """Trains as in FedAvg, then trains the personal model."""

    @serves
    def train(self, msg: Message, state: State, ctx: ClientContext) -> tuple[Result, State]:
        result, _ = super().train(msg, state, ctx)
        workspace = ctx.workspace
        x = trees.pick(msg.weights, workspace.trained)
        v = ctx.fit(
            _personal(state, ctx),
            [Term("gradient", away, x, self.options.lam)],
            data=ctx.own,
            epochs=self.options.plocal_epochs,
            stream="ditto",
            alone=True,
        )
        return result, {"v": trees.pick(v.params, [*workspace.shared, *workspace.kept])}

    def views(
        self, msg: Message, state: State, ctx: ClientContext
    ) -> dict[str, Callable[[], nn.Module]]:
        personal = {"personal": lambda: ctx.model(_personal(state, ctx))}
        return {**super().views(msg, state, ctx), **personal}


def _personal(state: State, ctx: ClientContext) -> Tree:
    """Return the v_k that the client keeps, or the initial model if it keeps none."""
    return {**ctx.workspace.initial, **(state.get("v") or {})}


@dataclass(frozen=True, kw_only=True)
class Ditto(Method):
    """Averages the w_k as FedAvg does; the v_k never leave their clients."""

    name = "ditto"
    client = DittoClient

    lam: float = setting(1.0, low=0)
    plocal_epochs: int = setting(1, low=1, high=MOST_EPOCHS)

    def evaluates(self, workspace: Workspace) -> dict[str, Sequence[str] | None]:
        return {"global": (), "personal": None}
