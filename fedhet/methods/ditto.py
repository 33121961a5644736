"""Ditto: a personal model beside the global one, regularised towards it (Li et al. 2021).

FedAvg trains the global model x. Beside it, each participant trains a personal model v_k
(algorithm 1):

    v_k <- v_k - lr (g_k(v_k) + lam (v_k - x_t))    for `plocal_epochs` epochs

where x_t is the model as received in this round.

    down:          x
    up:            w_k, n_k
    client keeps:  v_k, buffers included
    server keeps:  x

v_k starts from the common initial model, with which a client that has never taken part is also
evaluated. v_k is trained after w_k on the same batches, without plug-ins, and with its own
optimiser, random draws and batch norm statistics; x is therefore FedAvg's, bit for bit. With
lam = 0 the training of v_k is purely local.

The paper leaves open how the global problem is solved; here it is FedAvg, weighted by n_k.

Defaults: lam = 1, which the paper tunes in `0.05` to 2, and one epoch.

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
    """FedAvg's training, then that of the personal model."""

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
    """v_k as the client keeps it, or else its initial value."""
    return {**ctx.workspace.initial, **(state.get("v") or {})}


@dataclass(frozen=True, kw_only=True)
class Ditto(Method):
    """FedAvg of the w_k; the v_k never leave their clients."""

    name = "ditto"
    client = DittoClient

    lam: float = setting(1.0, low=0)
    plocal_epochs: int = setting(1, low=1, high=MOST_EPOCHS)

    def evaluates(self, workspace: Workspace) -> dict[str, Sequence[str] | None]:
        return {"global": (), "personal": None}
