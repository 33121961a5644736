"""A process that has imported what clients need, and forks a process for each message.

    python -P zygote.py <file descriptor of a connection> <process id of the SuperExec>

It runs as a script and imports nothing of fedhet, because a run brings its own copy of fedhet,
which alone may serve its messages. The first client of a run reports which app and context it has
received. From these a template is forked, which loads the app and lets it prepare itself (`prepare`
of the app's module, if there is one); it forks the run's further clients. Each process that forks
has one thread, but for OpenBLAS's, which end before a fork.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from logging import WARN
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import psutil

if __package__:
    from fedhet.deploy.node import forked_client
else:  # as a script, which has nothing of fedhet
    sys.path.insert(0, str(Path(__file__).parent))
    forked_client = importlib.import_module("forked_client")
    del sys.path[0]

# What a client imports sooner or later, but for fedhet. torch.cuda is asked without initialising
# CUDA, which would be lost in forked processes.
PRELOADED = (
    "torch",
    "hydra",
    "omegaconf",
    "safetensors.torch",
    "threadpoolctl",
    "rich.console",
    "flwr.client",
    "flwr.compat.common.recorddict_compat",
    "flwr.supernode.cli.flwr_clientapp",
)
IDLE_SECONDS = 900.0  # without a message of its run, a template ends and gives its memory back
ANSWER_SECONDS = 30.0  # for a template to fork
END_SECONDS = 15.0  # for clients to end once the SuperExec is gone; Flower tells them, then we do

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
        deadline = time.monotonic() + END_SECONDS
        while self._reap():
            wait([child.sentinel for child in self.children], 1)
            if psutil.pid_exists(self.superexec):
                deadline = time.monotonic() + END_SECONDS
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
        self.fork(forked_client.serve, order, report)

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


@dataclass
class Template:
    """The process that has loaded the app of a run, as the zygote sees it.

    Attributes:
        run: the run.
        connection: where the first client reports, and then the template's orders; None: the run
            has no template, because it could not be loaded.
        process: the template, once it is started.
        ready: whether it takes orders.
    """

    run: int
    connection: Connection | None
    process: ForkProcess | None = None
    ready: bool = False


class Zygote(Forker):
    """Forks clients that begin with the imports, or has the template of their run do it."""

    template: Template | None = None
    used = 0.0

    def launch(self, order: Order, report: Connection | None = None) -> None:
        """Fork the order's client, here or from the template of its run."""
        run = order[0]
        self.used = time.monotonic()
        if self.template and self.template.run != run:
            self._drop()
        if self.template is None:
            reader, report = FORK.Pipe(duplex=False)
            self.template = Template(run, reader)
        elif self.template.ready and self._passed_on(order):
            return
        super().launch(order, report)
        if report:
            report.close()

    def _passed_on(self, order: Order) -> bool:
        template = self.template
        assert template and template.connection and template.process
        problem = f"it did not answer within {ANSWER_SECONDS:g} s"
        try:
            template.connection.send(order)
            if template.connection.poll(ANSWER_SECONDS):
                problem = template.connection.recv()
                if not problem:
                    return True
        except (EOFError, OSError):
            problem = "it has ended"
        template.process.kill()
        self._drop()
        _warn("The template of run %d is not used any more: %s", order[0], problem)
        return False

    def connections(self) -> list[Connection]:
        return [self.orders, *self.sources()]

    def sources(self) -> list[Connection]:
        return [self.template.connection] if self.template and self.template.connection else []

    def timeout(self) -> float | None:
        return max(0.0, self.used + IDLE_SECONDS - time.monotonic()) if self.template else None

    def attend(self, heard: Sequence[Any]) -> None:
        template = self.template
        if template is None:
            return
        if not heard and self.timeout() == 0:
            self._drop()
        elif template.connection and template.connection in heard:
            try:
                told = template.connection.recv()
            except (EOFError, OSError):
                told = None
            if template.process is None:
                self._reported(template, told)
            else:
                self._loaded(template, "it has ended" if told is None else told)

    def _reported(self, template: Template, told: Any) -> None:
        """The run's first client has said what it has received, or has ended before."""
        self._drop()
        if told is None:
            return
        here, there = FORK.Pipe()
        self.template = Template(template.run, here)
        try:
            self.template.process = self.fork(_template, there, self.superexec, told)
        except OSError as error:
            self._loaded(self.template, str(error))
        finally:
            there.close()

    def _loaded(self, template: Template, problem: str) -> None:
        """The template has said whether it is ready, or has ended."""
        template.ready = not problem
        if problem:
            _warn(
                "Run %d has no template any more, and each of its clients loads everything itself:"
                " %s",
                *(template.run, problem),
            )
            self._drop()
            self.template = Template(template.run, None)

    def _drop(self) -> None:
        """Let the template end; the clients that it has forked go on."""
        if self.template and self.template.connection:
            self.template.connection.close()
        self.template = None

    def close(self) -> None:
        super().close()
        self._drop()


def _warn(text: str, *arguments: Any) -> None:
    from flwr.supercore import log

    log(WARN, text, *arguments)


def _child(inherited: Sequence[Connection], target: Any, *arguments: Any) -> None:
    for connection in inherited:
        connection.close()
    target(*arguments)


def _template(orders: Connection, superexec: int, told: Any) -> None:
    """Load the app of a run, and fork its clients."""
    try:
        forked_client.prepare(*told)
    except Exception as error:  # noqa: BLE001 -- whatever the app raises, its clients will report
        orders.send(f"{type(error).__name__}: {error}")
        return
    gc.freeze()
    orders.send("")
    Forker(orders, superexec).serve()


def main() -> None:
    """Import, and fork clients until the SuperExec closes the connection."""
    orders, superexec = Connection(int(sys.argv[1])), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the SuperNode ends us
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    gc.disable()
    for name in PRELOADED:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    gc.freeze()  # so that forked processes share these pages
    gc.enable()
    Zygote(orders, superexec).serve()


if __name__ == "__main__":
    main()
