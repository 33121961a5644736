"""Clients that attack the model, for the table of docs/faults.md."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedhet.core import check, trees
from fedhet.core.kernel import Plugin
from fedhet.core.messages import Update

FACTORS = {"none": 1.0, "sign_flip": -1.0, "sign_flip_x10": -10.0, "x10": 10.0, "x100": 100.0}


class Attack(Plugin):
    """Some clients train as all do, and then send something else than their change.

    Args:
        kind: a key of FACTORS, by which the change is multiplied; "random": a Gaussian direction
            with a hundred times the norm of the change; "absent": the client fails.
        attackers: the numbers of these clients.
    """

    name = "attack"

    def __init__(self, *, kind: str = "none", attackers: Sequence[int] = (0, 1)) -> None:
        self.kind = check.one_of("plugin.attack.kind", kind, (*FACTORS, "random", "absent"))
        self.attackers = list(attackers)
        super().__init__(kind=self.kind, attackers=self.attackers)

    def finish(self, update: Update) -> None:
        if update.pid not in self.attackers or self.kind == "none":
            return
        if self.kind == "absent":
            raise RuntimeError("absent")
        old = self.client.msg.weights
        change = trees.Difference(update.weights, old)
        if self.kind == "random":
            draw = self.client.generator("attack")
            noise = trees.map(
                lambda t: torch.randn(t.shape, generator=draw, dtype=torch.float64), change
            )
            new = trees.add(old, noise, 100 * trees.norm(change) / trees.norm(noise))
        else:
            new = trees.add(old, change, FACTORS[self.kind])
        update.weights = trees.cast(new, update.weights)
