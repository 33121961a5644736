"""A process that has imported what a run needs, and forks a process for each job.

A job's process begins with the imports, at no cost, and shares their memory; it takes nothing else
from another one, and its end, however it comes, concerns its run alone.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from fedhet import process
from fedhet.cli.errors import INTERRUPTED
from fedhet.cli.interrupts import interruptible
from fedhet.config import catalogue
from fedhet.core import interruptions
from fedhet.data.findable import Search
from fedhet.launchers.jobs import JobBatch, as_ours, redirect

FORK = multiprocessing.get_context("fork")

# What a run imports sooner or later. None of them starts CUDA, which a fork would lose.
PRELOADED = (
    "fedhet.data.partition",
    "fedhet.engines.local",
    "fedhet.job",
    "filelock",
    "pandas",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "PIL.BmpImagePlugin",
    "PIL.GifImagePlugin",
    "PIL.JpegImagePlugin",
    "PIL.PpmImagePlugin",
    "PIL.PngImagePlugin",
)
# What only some runs import: once a job has done so, the next ones begin with it.
OWN_ON_DEMAND = ("fedhet.maths.", "fedhet.methods.")
ON_DEMAND = (
    "flwr_datasets.partitioner",
    "opacus",
    "pyarrow.csv",
    "sklearn.datasets",
    "tokenizers",
    "torch.func",
    "torchvision.models",
    "torchvision.transforms",
)
FIGURES = "fedhet.record.figures"  # needs matplotlib, and the runs of an experiment draw none


@dataclass
class Running:
    """A job that runs.

    Attributes:
        process: its process.
        told: where it says what its folder is, and how it has ended.
    """

    process: ForkProcess
    told: Connection

    def heard(self) -> Any:
        """What it has said, or None: nothing, so far or any more."""
        try:
            return self.told.recv() if self.told.poll() else None
        except (EOFError, OSError):
            return None


class JobZygote:
    """Starts jobs, ends them, and passes on what they say.

    Orders are a JobBatch, which the next jobs belong to; (position, number, overrides) of a job to
    start; and the signal that all jobs are to get. Answers are (position, message), where a message
    is the run folder or the JobReturn, and in the end the exit code or the reason why no
    process could be started. A job's process also says what else should be imported for the next.
    A Search, before the first job, is answered by the error of the data that are missing, or None.

    Args:
        orders: the connection to the process that launches the jobs. When that ends, so do they.
    """

    def __init__(self, orders: Connection) -> None:
        self.orders = orders
        self.batch: JobBatch | None = None
        self.running: dict[int, Running] = {}

    def serve(self) -> None:
        """Obey until the other side closes the connection."""
        try:
            while True:
                connections = [running.told for running in self.running.values()]
                sentinels = [running.process.sentinel for running in self.running.values()]
                heard = wait([self.orders, *connections, *sentinels])
                for position in list(self.running):
                    self._attend(position)
                if self.orders in heard:
                    self._obey(self.orders.recv())
        except (EOFError, OSError):
            for running in self.running.values():
                running.process.kill()

    def _attend(self, position: int) -> None:
        """Pass on what a job has said, and its exit code if it has ended."""
        running = self.running[position]
        ended = not running.process.is_alive()  # asked first: what it has said is complete then
        while (message := running.heard()) is not None:
            if isinstance(message, list):
                self._import(message)
            else:
                self.orders.send((position, message))
        if ended:
            del self.running[position]
            running.told.close()
            self.orders.send((position, running.process.exitcode))

    def _obey(self, order: Any) -> None:
        if isinstance(order, JobBatch):
            self.batch = order
            order.prepare()
            gc.freeze()
        elif isinstance(order, Search):
            self._find(order)
        elif isinstance(order, int):
            for running in self.running.values():
                if running.process.is_alive():
                    os.kill(running.process.pid or 0, order)
        else:
            self._start(*order)

    def _find(self, search: Search) -> None:
        told, tell = FORK.Pipe(duplex=False)
        child = FORK.Process(target=_find, args=(search, tell, [self.orders, told]))
        child.start()
        tell.close()
        problem = None
        with told, suppress(EOFError):  # it has died: the jobs will tell why
            self._import(told.recv())
            problem = told.recv()
        child.join()
        self.orders.send(problem)

    def _import(self, names: list[str]) -> None:
        new = [name for name in names if name not in sys.modules]
        for name in new:
            importlib.import_module(name)
        if new:
            gc.freeze()

    def _start(self, position: int, number: int, overrides: list[str]) -> None:
        with suppress(Exception):  # the job will tell
            if (
                self.batch and self.batch.bases(overrides).figures
            ):  # composed: its like start faster
                self._import([FIGURES])
        told, tell = FORK.Pipe(duplex=False)
        inherited = [self.orders, told, *(running.told for running in self.running.values())]
        arguments = (self.batch, number, overrides, tell, inherited)
        child = FORK.Process(target=_job, args=arguments)
        try:
            with process.signals_deferred():  # until it has its own handlers
                child.start()
        except OSError as error:
            told.close()
            self.orders.send((position, f"no process can be started for it: {error.strerror}"))
        else:
            self.running[position] = Running(child, told)
        finally:
            tell.close()


def _job(
    batch: JobBatch,
    number: int,
    overrides: list[str],
    tell: Connection,
    inherited: list[Connection],
) -> None:
    """The process of a job."""
    for connection in inherited:
        connection.close()
    try:
        # Ctrl-C is for the launching process, which has SIGTERM sent, once.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with interruptible():
            signal.signal(signal.SIGTERM, _interrupt_once)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, process.SIGNALS)
            process.end_with_parent()

            def begins(folder: Path) -> None:
                redirect(folder)
                tell.send(folder)

            done = batch.run(number, overrides, begins)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        tell.send(done)
        tell.send(_on_demand())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _find(search: Search, tell: Connection, inherited: list[Connection]) -> None:
    """The process that looks for the data of jobs."""
    for connection in inherited:
        connection.close()
    process.end_with_parent()
    problem = None
    try:
        search.run()
    except Exception as error:  # noqa: BLE001 -- told where the command ends
        problem = as_ours(error)
    tell.send(_on_demand())
    tell.send(problem)


def _on_demand() -> list[str]:
    """What this process has imported and the next ones will need."""
    return [name for name in sys.modules if name in ON_DEMAND or name.startswith(OWN_ON_DEMAND)]


def _interrupt_once(number: int, frame: Any) -> None:
    """Handle a signal like Ctrl-C; a second one would disturb the record of the first."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    interruptions.interrupt(number, frame)


def serve(orders: Connection) -> None:
    """Import, and start jobs until the launching process ends."""
    for number in process.SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, process.SIGNALS)
    # torch.cuda.is_available() must not start CUDA here.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    gc.disable()
    for name in PRELOADED:
        importlib.import_module(name)
    process.pin_threads(1)
    catalogue.targets()  # what files name, which each run must know
    gc.freeze()
    gc.enable()
    JobZygote(orders).serve()
