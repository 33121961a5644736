"""Local training: every client trains a model of its own, and nobody communicates.

This is the training that a client can do without a federation, so it is the reference that a
federation must beat. Each participant starts from the common initial model w_k = x_0, and trains on
with its own data:

    client: w_k <- w_k - lr g_k(w_k) over E epochs of mini-batches

    down:          nothing but the settings of the step
    up:            n_k
    client keeps:  w_k, buffers included
    server keeps:  x_0, the model slot, which never changes

A client takes part in the same rounds, and takes the same number of steps, as under FedAvg with the
same settings. Its personal model is Ditto's with lam = 0 and `plocal_epochs` equal to
`client.epochs`, bit for bit if the model draws no random numbers. Unlike Ditto, this method has no
global model and sends no weights. A client that has never taken part is evaluated with x_0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from fedhet.core.authors import (
    Merged,
    Method,
    Scope,
    State,
    Step,
    Tree,
    Update,
    Workspace,
)


@dataclass(frozen=True, kw_only=True)
class Local(Method):
    """Shares nothing: each client continues with its own model, and nothing is merged."""

    name = "local"
    breaks = {
        "used weights": "nothing is averaged",
        "noise": "its clients send nothing to which noise could be added",
    }

    @classmethod
    def scope(cls, model: nn.Module) -> Scope:
        return Scope(shared=lambda name: False)

    def evaluates(self, workspace: Workspace) -> dict[str, None]:
        return {"personal": None}

    def merge(self, step: Step, state: State, old: Tree, updates: Iterator[Update]) -> Merged:
        return Merged({}, state)
