"""A plug-in that fails on purpose, for client 3 in step 2 or 1, or says where it is, for all.

A run uses it by `plugin.fednorm._target_=faulty.Faulty` with FEDHET_TRUST=faulty.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import ray
import torch
from flwr.supernode.runtime import run_clientapp

from fedhet.core import trees
from fedhet.core.messages import Broadcast, Update
from fedhet.methods.fednorm import FedNormPlugin, Z
from fedhet.stores import MemoryStore


class Faulty(FedNormPlugin):
    """FedNorm, but `z_when` says how it fails: as one of the words below.

    With `killed-after-reply`, a client's process of a deployment is killed once it has handed over
    its reply, before it reports the end of its task. With `stuck` the client leaves a file in
    FEDHET_TEST_FOLDER and never returns, nor does it let go of the interpreter. With `node` and
    `hang` it does so for all clients, with the Ray node's name, and with `hang` it never returns.
    """

    def __init__(self, *, temperature: float, z_when: str) -> None:
        super().__init__(temperature=temperature)
        self.how = z_when

    def _strikes(self) -> bool:
        step = 1 if self.how == "huge" else 2
        return self.client.pid == 3 and self.client.msg.step == step

    def prepare(self, msg: Broadcast) -> None:
        if self.how in ("node", "hang"):
            node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else "none"
            Path(os.environ["FEDHET_TEST_FOLDER"], node).touch()
        if self.how == "hang":
            time.sleep(100_000)
        if self._strikes() and self.how == "raise":
            raise OSError("the disk is full")
        if self._strikes() and self.how == "exit":
            os._exit(7)
        if self._strikes() and self.how == "leaves":
            sys.exit(0)
        if self._strikes() and self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._strikes() and self.how == "killed-after-reply":
            run_clientapp.flwr_exit = lambda **_: os.kill(os.getpid(), signal.SIGKILL)
        if self._strikes() and self.how == "forgets":
            self.client.state.store = MemoryStore()  # an empty one
        if self._strikes() and self.how == "stuck":
            Path(os.environ["FEDHET_TEST_FOLDER"], "stuck").touch()
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
            ctypes.PyDLL(None).sleep(100_000)

    def finish(self, update: Update) -> None:
        super().finish(update)
        if not self._strikes() or not update.weights:
            return
        first = next(iter(update.weights))
        if self.how == "nonfinite":
            update.weights[first] = update.weights[first] * float("nan")
        elif self.how == "huge":
            update.weights = trees.map(lambda t: torch.full_like(t, 1e6), update.weights)
        elif self.how == "shape":
            update.weights[first] = update.weights[first][:-1]
        elif self.how == "extra":
            update.extras[Z] = torch.full((3,), float("inf"))
