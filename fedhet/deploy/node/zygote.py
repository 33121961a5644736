"""A process that has imported what clients need, and forks a process for each message.

    python -P zygote.py <file descriptor of a connection> <process id of the SuperExec>

It runs as a script and imports nothing of fedhet, because a run brings its own copy of fedhet,
which alone may serve its messages. The first client of a run reports which app and context it has
received. From these a template is forked, which loads the app and lets it prepare itself (`prepare`
of the app's module, if there is one); it forks the run's further clients. Each process that forks
has one thread, but for OpenBLAS's, which end before a fork; a template that has others is not used.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from logging import WARN
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

if __package__:
    from fedhet.deploy.node import forked_client, forker
else:  # as a script, which has nothing of fedhet
    sys.path.insert(0, str(Path(__file__).parent))
    forked_client = importlib.import_module("forked_client")
    forker = importlib.import_module("forker")
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


class ClientZygote(forker.Forker):
    """Forks clients that begin with the imports, or has the template of their run do it."""

    def __init__(self, orders: Connection, superexec: int) -> None:
        super().__init__(orders, superexec)
        self.template: Template | None = None
        self.used = 0.0
        self.last = -1  # the run of the last order
        self.seen: set[int] = set()  # all runs that have had orders

    def launch(self, order: forker.Order, report: Connection | None = None) -> None:
        """Fork the order's client, here or from the template of its run."""
        run = order[0]
        # While two runs take turns, one of them keeps the template: a change at each order would
        # only load templates that nobody uses.
        due = run == self.last or run not in self.seen
        if self.template and self.template.run != run and due:
            self._drop()
        self.last = run
        self.seen.add(run)
        if self.template is None:
            reader, report = forker.FORK.Pipe(duplex=False)
            self.template = Template(run, reader)
        if self.template.run == run:
            self.used = time.monotonic()
            if self.template.ready and self._passed_on(order):
                return
        super().launch(order, report)
        if report:
            report.close()

    def _passed_on(self, order: forker.Order) -> bool:
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
        here, there = forker.FORK.Pipe()
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


def _template(orders: Connection, superexec: int, told: Any) -> None:
    """Load the app of a run, and fork its clients."""
    problem = ""
    context, folder, digest = told
    try:
        forked_client.prepare(context, folder)
        forked_client.keep_installed(folder, digest)
    except Exception as error:  # noqa: BLE001 -- whatever the app raises, its clients will report
        problem = f"{type(error).__name__}: {error}"
    gc.freeze()
    try:
        orders.send(problem)
    except OSError:
        return  # the zygote has dropped it in the meantime
    if not problem:
        forker.Forker(orders, superexec).serve()


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
    ClientZygote(orders, superexec).serve()


if __name__ == "__main__":
    main()
