"""Clients that attack the model, for the table of docs/promises_measured.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedhet.core import trees
from fedhet.core.check import setting
from fedhet.core.client.client import FedClient
from fedhet.core.kernel import Plugin
from fedhet.core.messages import Broadcast, Failure, Reply, Upload

FACTORS = {"none": 1.0, "sign_flip": -1.0, "sign_flip_x10": -10.0, "x10": 10.0, "x100": 100.0}


@dataclass(frozen=True, kw_only=True)
class Attack(Plugin):
    """Some clients train like all others, and then send something other than their change.

    Attributes:
        kind: a key of FACTORS: the change is multiplied by this factor; "random": a Gaussian
            direction with a hundred times the norm of the change; "absent": the client fails.
        attackers: the numbers of these clients.
    """

    name = "attack"

    kind: str = setting("none", allowed=(*FACTORS, "random", "absent"))
    attackers: Sequence[int] = (0, 1)


def sent(attack: Attack, client: FedClient, update: Upload) -> trees.Tree:
    """Return the weights that the attacker sends instead of its own."""
    old = client.msg.weights
    change = trees.Difference(update.weights, old)
    if attack.kind != "random":
        new = trees.add(old, change, FACTORS[attack.kind])
    else:
        draw = client.ctx.stream("attack")
        noise = trees.map(
            lambda t: torch.randn(t.shape, generator=draw, dtype=torch.float64), change
        )
        new = trees.add(old, noise, 100 * trees.norm(change) / trees.norm(noise))
    return trees.cast(new, update.weights)


_handle = FedClient.handle


def _handled(client: FedClient, msg: Broadcast) -> Reply:
    """Serve a message; if the client is an attacker, alter its reply.

    A plug-in cannot reach the weights of a reply. So this function replaces `FedClient.handle`.
    """
    reply = _handle(client, msg)
    attack = next((plugin for plugin in client.plugins if isinstance(plugin, Attack)), None)
    if attack is None or attack.kind == "none" or msg.pid not in attack.attackers:
        return reply
    if msg.trains and isinstance(reply, Upload):
        if attack.kind == "absent":
            return Failure(msg.pid, msg.phase, msg.step, "absent")
        reply.weights = sent(attack, client, reply)
    return reply


FedClient.handle = _handled  # type: ignore[method-assign]
