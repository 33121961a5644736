"""FedNorm whose clients fail at random: the plug-in that test_soak.py puts in FedNorm's place.

A second run, in which the clients that failed say at once that they are absent, has the same
cohorts, so that the two must end with the same weights.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedhet.core import trees
from fedhet.core.check import setting
from fedhet.core.client.client import FedClient
from fedhet.core.client.context import ClientContext, Fitted
from fedhet.core.errors import LostState
from fedhet.core.kernel import Message, Result, State, Term
from fedhet.core.messages import LOST, Broadcast, Reply, Upload
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.methods.fedprox import away

FAILED = "FEDHET_SOAK_FAILED"  # names a file of [client, step, reason]: who is absent
STATES = "fedhet-state-*/{pid}/*.safetensors"  # in the temporary folder: what clients remember
SHARE = 0.1  # of the messages for which each fault is drawn, independently of the others: later
# ones strike less often, since a client whose process has ended has no reply to damage
OWN = "own"  # what a client remembers: the weights with which it ended last
PULL = 0.1  # of the pull towards them, so that a wrong state shows in the model
Z = "fednorm.z"
OVERSIZED_BYTES = 2**22
EXTRAS = 1000  # that nobody expects, in one reply
SLOW_SHARE = 0.03  # of the clients in the second run take `SLOW_SECONDS`: time must not count there
SLOW_SECONDS = 1.0

Parts = list[bytes]
Change = Callable[[Upload], object]


def _raise() -> None:
    raise OSError("the disk is full")


def flipped(data: bytes, random: np.random.Generator) -> bytes:
    """The bytes with one of them changed."""
    position = int(random.integers(len(data)))
    return data[:position] + bytes([data[position] ^ 0xFF]) + data[position + 1 :]


def _damage(parts: Parts, random: np.random.Generator) -> Parts:
    index = int(random.integers(len(parts)))
    return [*parts[:index], flipped(parts[index], random), *parts[index + 1 :]]


def _changed(change: Callable[[torch.Tensor], torch.Tensor], every: bool = False) -> Change:
    """Change the reply's first tensor, or every one of floats."""

    def fault(update: Upload) -> None:
        for name, t in update.weights.items() if every else [*update.weights.items()][:1]:
            if t.is_floating_point() or not every:
                update.weights[name] = change(t)

    return fault


def _rename(update: Upload) -> None:
    name = next(iter(update.weights))
    update.weights[f"{name}!"] = update.weights.pop(name)


# What happens before a client works; the first of these that strikes is the only one that can.
BEFORE: dict[str, Callable[[], None]] = {
    "its process exits": lambda: os._exit(7),
    "its process is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "it hangs": lambda: time.sleep(100_000),
    "it raises an exception": _raise,
}
# What is done to the files of what it remembers, if it remembers something.
STATE: dict[str, Callable[[Path], object]] = {
    "a lost state": Path.unlink,
    "a damaged state": lambda state: state.write_bytes(
        flipped(state.read_bytes(), np.random.default_rng(0))
    ),
}
# What is done to its reply.
AFTER: dict[str, Change] = {
    "NaN": _changed(lambda t: t * float("nan")),
    "an outlier": _changed(lambda t: 1e6 * t, every=True),
    "a negative count": lambda update: setattr(update, "num_examples", -15),
    "a huge count": lambda update: setattr(update, "num_examples", 10**18),
    "another shape": _changed(lambda t: t[:-1]),
    "a shape that could be broadcast": _changed(lambda t: t.flatten()[:1].reshape([1] * t.dim())),
    "another type": _changed(lambda t: t.double()),
    "another name": _rename,
    "a bad extra": lambda update: update.extras.update({Z: torch.full((3,), float("inf"))}),
    "a thousand extras": lambda update: update.extras.update(
        {f"{Z}.{number}": torch.ones(1) for number in range(EXTRAS)}
    ),
}
# What is done to the bytes of its reply.
ON_THE_WAY: dict[str, Callable[[Parts, np.random.Generator], Parts]] = {
    "damaged bytes": _damage,
    "too many bytes": lambda parts, random: [*parts, bytes(OVERSIZED_BYTES)],
}
# What comes in place of its reply.
INSTEAD = ("its reply to an earlier message", "the reply of another client")
FAULTS = (*BEFORE, *STATE, *AFTER, *ON_THE_WAY, *INSTEAD)


def drawn(pid: int, step: int) -> list[str]:
    """The faults that hit this client in this step."""
    hit = np.random.default_rng([pid, step]).random(len(FAULTS)) < SHARE
    return [name for name, struck in zip(FAULTS, hit, strict=True) if struck]


@dataclass(frozen=True, kw_only=True)
class Faulty(FedNormPlugin):
    """FedNorm with these faults, or, with `z_when="absent"`, without them and those who failed.

    Beside FedNorm's work, a client is pulled towards the weights with which it ended last.
    """

    z_when: str = setting("after_training", allowed=("after_training", "absent"))

    def _absent(self) -> dict[tuple[int, int], str]:
        failed = json.loads(Path(os.environ[FAILED]).read_text())
        return {(pid, step): reason for pid, step, reason in failed}

    def terms(self, msg: Message, state: State, ctx: ClientContext) -> list[Term]:
        if self.z_when == "absent":
            who, absent = (msg.pid, msg.step), self._absent()
            if who in absent:
                raise (LostState if absent[who] == LOST else OSError)("absent")
            if np.random.default_rng([*who, 2]).random() < SLOW_SHARE:
                time.sleep(SLOW_SECONDS)
        for name in self._faults(msg):
            if name in BEFORE:
                BEFORE[name]()
            elif name in STATE:
                for path in Path(tempfile.gettempdir()).glob(STATES.format(pid=msg.pid)):
                    STATE[name](path)
        before = state.get(OWN)
        return [Term("gradient", away, before, PULL)] if before else []

    def finish(
        self, msg: Message, state: State, ctx: ClientContext, fitted: Fitted
    ) -> tuple[Result, State]:
        fednorm = FedNormPlugin(temperature=self.temperature)
        result, _ = fednorm.finish(msg, state, ctx, fitted)
        return result, {OWN: trees.pick(fitted.params, ctx.workspace.mergeable)}

    def _faults(self, msg: Message | Broadcast) -> list[str]:
        return drawn(msg.pid, msg.step) if self.z_when != "absent" else []


_handle = FedClient.handle


def _handled(client: FedClient, msg: Broadcast) -> Reply:
    """Serve a message as a client of Faulty does, whose reply is another one.

    A plug-in cannot reach it, so that the method of the client is replaced.
    """
    reply = _handle(client, msg)
    faulty = next((plugin for plugin in client.plugins if isinstance(plugin, Faulty)), None)
    if faulty and msg.trains and isinstance(reply, Upload):
        for name in faulty._faults(msg):
            if name in AFTER:
                AFTER[name](reply)
    return reply


FedClient.handle = _handled  # type: ignore[method-assign]
