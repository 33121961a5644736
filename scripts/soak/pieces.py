"""FedNorm whose clients fail at random: the plug-in that a soak run puts in FedNorm's place.

A second run, in which the clients that failed say at once that they are absent, has the same
cohorts, so that the two must end with the same weights.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from fedhet.messages import Broadcast, Update
from fedhet.methods.fednorm import FedNormPlugin, Z

FAILED = "FEDHET_SOAK_FAILED"  # names a file of [client, step] pairs: who is absent
SHARE = 0.1  # of the replies that each fault hits, independently of the others


def _raise() -> None:
    raise OSError("the disk is full")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _first(update: Update, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    name = next(iter(update.weights))
    update.weights[name] = change(update.weights[name])


def _outlier(update: Update) -> None:
    update.weights = {
        name: 1e6 * t if t.is_floating_point() else t for name, t in update.weights.items()
    }


def _count(update: Update) -> None:
    update.num_examples = -15


def _rename(update: Update) -> None:
    name = next(iter(update.weights))
    update.weights[f"{name}!"] = update.weights.pop(name)


def _extra(update: Update) -> None:
    update.extras[Z] = torch.full((3,), float("inf"))


# What happens before a client works; the first of these that strikes is the only one that can.
BEFORE: dict[str, Callable[[], None]] = {
    "its process exits": lambda: os._exit(7),
    "its process is killed": _kill,
    "it hangs": lambda: time.sleep(100_000),
    "it raises an exception": _raise,
}
# What is done to its reply.
AFTER: dict[str, Callable[[Update], None]] = {
    "NaN": lambda update: _first(update, lambda t: t * float("nan")),
    "an outlier": _outlier,
    "a negative count": _count,
    "another shape": lambda update: _first(update, lambda t: t[:-1]),
    "another type": lambda update: _first(update, lambda t: t.double()),
    "another name": _rename,
    "a bad extra": _extra,
}


def drawn(pid: int, step: int) -> list[str]:
    """The faults that hit this client in this step."""
    hit = np.random.default_rng([pid, step]).random(len(BEFORE) + len(AFTER)) < SHARE
    return [name for name, struck in zip([*BEFORE, *AFTER], hit, strict=True) if struck]


class Faulty(FedNormPlugin):
    """FedNorm with these faults, or, with `z_when="absent"`, without them and those who failed."""

    def __init__(self, *, temperature: float, z_when: str) -> None:
        super().__init__(temperature=temperature)
        self.absent: set[tuple[int, int]] | None = None
        if z_when == "absent":
            failed = json.loads(Path(os.environ[FAILED]).read_text())
            self.absent = {(pid, step) for pid, step in failed}

    def _faults(self) -> list[str]:
        return drawn(self.client.pid, self.client.msg.step) if self.absent is None else []

    def prepare(self, msg: Broadcast) -> None:
        if self.absent and (self.client.pid, msg.step) in self.absent:
            raise OSError("absent")
        for name in self._faults():
            if name in BEFORE:
                BEFORE[name]()

    def finish(self, update: Update) -> None:
        super().finish(update)
        for name in self._faults():
            if name in AFTER:
                AFTER[name](update)
