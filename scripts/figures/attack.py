"""Clients that attack the model, for the table of docs/faults.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedhet.core import trees
from fedhet.core.check import setting
from fedhet.core.client.client import FedClient
from fedhet.core.client.site import Fitted, Site
from fedhet.core.kernel import Message, Plugin, Result, State
from fedhet.core.messages import Broadcast, Reply, Upload

FACTORS = {"none": 1.0, "sign_flip": -1.0, "sign_flip_x10": -10.0, "x10": 10.0, "x100": 100.0}


@dataclass(frozen=True, kw_only=True)
class Attack(Plugin):
    """Some clients train as all do, and then send something else than their change.

    Attributes:
        kind: a key of FACTORS, by which the change is multiplied; "random": a Gaussian direction
            with a hundred times the norm of the change; "absent": the client fails.
        attackers: the numbers of these clients.
    """

    name = "attack"

    kind: str = setting("none", allowed=(*FACTORS, "random", "absent"))
    attackers: Sequence[int] = (0, 1)

    def finish(
        self, msg: Message, state: State, site: Site, fitted: Fitted
    ) -> tuple[Result, State]:
        if self.kind == "absent" and msg.pid in self.attackers:
            raise RuntimeError("absent")
        return Result(), state

    def _change(self, client: FedClient, update: Upload) -> None:
        """Put what the attacker sends in the place of its weights."""
        old = client.msg.weights
        change = trees.Difference(update.weights, old)
        if self.kind == "random":
            draw = client.trainer.generator("attack")
            noise = trees.map(
                lambda t: torch.randn(t.shape, generator=draw, dtype=torch.float64), change
            )
            new = trees.add(old, noise, 100 * trees.norm(change) / trees.norm(noise))
        else:
            new = trees.add(old, change, FACTORS[self.kind])
        update.weights = trees.cast(new, update.weights)


_handle = FedClient.handle


def _handled(client: FedClient, msg: Broadcast) -> Reply:
    """Serve a message as the attackers do.

    A plug-in cannot reach the weights of a reply, so that the method of the client is replaced.
    """
    reply = _handle(client, msg)
    attack = next((plugin for plugin in client.plugins if isinstance(plugin, Attack)), None)
    attacks = attack is not None and attack.kind != "none" and msg.pid in attack.attackers
    if attacks and msg.trains and isinstance(reply, Upload):
        attack._change(client, reply)
    return reply


FedClient.handle = _handled  # type: ignore[method-assign]
