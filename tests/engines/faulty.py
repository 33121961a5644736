"""A plug-in that fails on purpose, for client 3 in step 2 or 1, or says where it is, for all.

A run uses it by `plugin.fednorm._target_=faulty.Faulty` with FEDHET_TRUST=faulty.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import ray
import torch
from flwr.supernode.runtime import run_clientapp

from fedhet.core import trees
from fedhet.core.check import setting
from fedhet.core.client.client import FedClient
from fedhet.core.client.context import ClientContext, Fitted
from fedhet.core.kernel import Message, Result, State, Term
from fedhet.core.messages import Broadcast, Reply, Upload
from fedhet.methods.fednorm import FedNormPlugin
from fedhet.runs.stores import MemoryStore


@dataclass(frozen=True, kw_only=True)
class Faulty(FedNormPlugin):
    """FedNorm, but `z_when` says how it fails: as one of the words below.

    With `killed-after-reply`, a client's process of a deployment is killed once it has handed over
    its reply, before it reports the end of its task. With `stuck` the client leaves a file in
    FEDHET_TEST_FOLDER and never returns, nor does it let go of the interpreter. With `node` and
    `hang` it does so for all clients, with the Ray node's name, and with `hang` it never returns.
    """

    z_when: str = setting("raise")

    def _strikes(self, msg: Message | Broadcast) -> bool:
        return msg.pid == 3 and msg.step == (1 if self.z_when == "huge" else 2)

    def terms(self, msg: Message, state: State, ctx: ClientContext) -> list[Term]:
        how = self.z_when if self._strikes(msg) else ""
        if self.z_when in ("node", "hang"):
            node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else "none"
            Path(os.environ["FEDHET_TEST_FOLDER"], node).touch()
        if self.z_when == "hang":
            time.sleep(100_000)
        if how == "raise":
            raise OSError("the disk is full")
        if how == "exit":
            os._exit(7)
        if how == "leaves":
            sys.exit(0)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "killed-after-reply":
            run_clientapp.flwr_exit = lambda **_: os.kill(os.getpid(), signal.SIGKILL)
        if how == "stuck":
            Path(os.environ["FEDHET_TEST_FOLDER"], "stuck").touch()
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
            ctypes.PyDLL(None).sleep(100_000)
        return []

    def finish(
        self, msg: Message, state: State, ctx: ClientContext, fitted: Fitted
    ) -> tuple[Result, State]:
        if self.z_when == "extra" and self._strikes(msg):
            return Result(extras={"z": torch.full((3,), float("inf"))}), state
        return FedNormPlugin(temperature=self.temperature).finish(msg, state, ctx, fitted)


def _damage(how: str, update: Upload) -> None:
    first = next(iter(update.weights))
    if how == "nonfinite":
        update.weights[first] = update.weights[first] * float("nan")
    elif how == "huge":
        update.weights = trees.map(lambda t: torch.full_like(t, 1e6), update.weights)
    elif how == "shape":
        update.weights[first] = update.weights[first][:-1]


_handle = FedClient.handle


def _handled(client: FedClient, msg: Broadcast) -> Reply:
    """Serve a message as a client of Faulty does: its store, or its reply, is another one.

    A plug-in cannot reach these, so that the driver of the pieces is replaced.
    """
    faulty = next((plugin for plugin in client.plugins if isinstance(plugin, Faulty)), None)
    if faulty is None or not msg.trains or not faulty._strikes(msg):
        return _handle(client, msg)
    store = client.store
    if faulty.z_when == "forgets":
        client.store = MemoryStore()  # an empty one
    try:
        reply = _handle(client, msg)
    finally:
        client.store = store
    if isinstance(reply, Upload):
        _damage(faulty.z_when, reply)
    return reply


FedClient.handle = _handled  # type: ignore[method-assign]
