"""A process that forks a client for each order: the zygote, and each of its templates.

Like zygote.py, it imports nothing of fedhet.
"""

from __future__ import annotations

import importlib
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

import psutil

if __package__:
    from fedhet.deploy.node import forked_client
else:  # zygote.py runs as a script
    forked_client = importlib.import_module("forked_client")

FORK = multiprocessing.get_context("fork")
Order = tuple[int, list[str], bool]  # of a client: its run, its command line, whether it is silent


class Forker:
    """Forks a client for each order.

    Args:
        orders: where orders come from, and where "" or the reason of a failure goes.
        superexec: the process id of the SuperExec.
    """

    def __init__(self, orders: Connection, superexec: int) -> None:
        self.orders = orders
        self.superexec = superexec
        self.children: list[ForkProcess] = []

    def serve(self) -> None:
        """Work until the other side closes the connection, and then until all children end."""
        while self._listen():
            pass
        self.close()
        deadline = time.monotonic() + forked_client.END_SECONDS
        while self._reap():
            wait([child.sentinel for child in self.children], 1)
            if psutil.pid_exists(self.superexec):
                deadline = time.monotonic() + forked_client.END_SECONDS
            elif time.monotonic() > deadline:
                for child in self.children:
                    child.kill()

    def _listen(self) -> bool:
        sentinels = [child.sentinel for child in self.children]
        heard = wait([self.orders, *sentinels, *self.sources()], self.timeout())
        self._reap()
        try:
            if self.orders in heard:
                self.orders.send(self._obey(self.orders.recv()))
        except (EOFError, OSError):
            return False
        self.attend(heard)
        return True

    def _reap(self) -> bool:
        self.children = [child for child in self.children if child.is_alive()]
        return bool(self.children)

    def _obey(self, order: Order) -> str:
        try:
            self.launch(order)
        except OSError as error:
            return f"no process can be started for it: {error}"
        return ""

    def launch(self, order: Order, report: Connection | None = None) -> None:
        """Fork a client."""
        self.fork(forked_client.serve, order, report, self.superexec)

    def fork(self, target: Any, *arguments: Any) -> ForkProcess:
        """Fork a child, which closes this process's connections."""
        child = FORK.Process(target=_child, args=(self.connections(), target, *arguments))
        child.start()
        self.children.append(child)
        return child

    def connections(self) -> list[Connection]:
        """What no child may hold open, or nobody would notice that this process has ended."""
        return [self.orders]

    def sources(self) -> list[Connection]:
        """What else to listen to."""
        return []

    def timeout(self) -> float | None:
        """How long to listen, in seconds."""
        return None

    def attend(self, heard: Sequence[Any]) -> None:
        """Do what is due after listening."""

    def close(self) -> None:
        """Let nobody reach this process any more."""
        self.orders.close()


def _child(inherited: Sequence[Connection], target: Any, *arguments: Any) -> None:
    for connection in inherited:
        connection.close()
    target(*arguments)
