"""The transport to clients in worker processes; messages travel in shared memory.

ray.py uses the same class `Pool` to hand out messages to workers.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from math import inf
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from fedhet.core.errors import log
from fedhet.core.groups import ReplyLimits
from fedhet.core.messages import Broadcast, Failure, Reply, Upload, payload
from fedhet.core.server.loop import Clock
from fedhet.engines.shared import Reader, Writer
from fedhet.runs.job import Job
from fedhet.runs.process import (
    SIGNALS,
    TOGETHER_SECONDS,
    end_with_parent,
    pin_threads,
    signals_deferred,
    thread_names,
)
from fedhet.runs.stores import DiskStore

END_SECONDS = 3.0  # how long the workers may take to end before they are killed
# Limit on the bytes of replies that were received before their turn. Above it, no further message
# is handed out while at least as many replies are held as there are workers.
AHEAD_BYTES = 2**28


class MachineLost(OSError):
    """The machine of a worker is lost, which is no fault of the client that it served."""


@dataclass
class PoolExchange:
    """The state of one step's messages.

    Attributes:
        waiting: the messages that no worker has got yet.
        idle: the workers without a message.
        enough: the number of replies after which the server waits only `replies.grace` seconds
            longer; None: it waits for all replies.
        most: how many messages a worker may get at once.
        busy: worker -> its messages.
        due: worker -> its deadline, on the monotonic clock.
        closing: when the server stops waiting for all replies, on the monotonic clock.
        held: client -> its reply, if the reply arrived before its turn.
        arrived: the number of replies so far, without failures.
    """

    waiting: deque[Broadcast]
    idle: list[Any]
    enough: int | None = None
    most: int = 1
    busy: dict[Any, list[Broadcast]] = field(default_factory=dict)
    due: dict[Any, float] = field(default_factory=dict)
    closing: float = inf
    held: dict[int, Reply] = field(default_factory=dict)
    arrived: int = 0

    @property
    def seconds_left(self) -> float | None:
        """The seconds until the next worker is overdue; None if there is no deadline."""
        soonest = min([self.closing, *(self.due[worker] for worker in self.busy)])
        return None if soonest == inf else max(0.0, soonest - time.monotonic())

    @property
    def held_bytes(self) -> int:
        """The size of the replies that arrived before their turn."""
        return sum(
            sum(payload("", reply.weights, reply.extras).values())
            for reply in self.held.values()
            if isinstance(reply, Upload)
        )


class Pool(ABC):
    """Gives each worker its next messages as soon as it has replied: one, or a few small ones.

    Args:
        limits: how long to wait for replies.
        some: whether to obey `replies.enough`.
    """

    _most = 1  # how many messages a worker may get at once

    def __init__(self, limits: ReplyLimits, *, some: bool = False) -> None:
        self._limits = limits
        self._some = some
        self._workers: dict[Any, Any] = {}

    def exchange(self, plan: list[Broadcast], clock: Clock) -> Iterator[Reply]:
        with clock("broadcast"):
            self._begin(plan)
        enough = self._limits.enough_of(len(plan)) if self._some else None
        most = self._most if enough is None and self._limits.deadline is None else 1
        exchange = PoolExchange(deque(plan), list(self._workers), enough, most)
        for msg in plan:
            self._hand_out(exchange, clock)
            while msg.pid not in exchange.held:
                with clock("clients"):
                    ready = self._wait(list(exchange.busy), exchange.seconds_left)
                if not ready:
                    self._end_overdue(exchange)
                for worker in ready:
                    self._take_replies(worker, exchange, clock)
                self._hand_out(exchange, clock)
            yield exchange.held.pop(msg.pid)

    def _hand_out(self, exchange: PoolExchange, clock: Clock) -> None:
        """Give every idle worker its next messages, unless too many replies wait for their turn."""
        while exchange.idle and exchange.waiting:
            if len(exchange.held) >= len(self._workers) and exchange.held_bytes >= AHEAD_BYTES:
                return
            number = min(exchange.most, len(exchange.waiting) // (2 * len(self._workers)))
            messages = [exchange.waiting.popleft() for _ in range(max(1, number))]
            with clock("broadcast"):
                worker = self._send(exchange.idle.pop(0), messages)
            exchange.busy[worker] = messages
            # A client stops at its deadline by itself, unless it hangs outside of Python.
            seconds = messages[0].deadline or inf
            exchange.due[worker] = time.monotonic() + seconds + self._limits.grace

    def _end_overdue(self, exchange: PoolExchange) -> None:
        """Kill and replace the workers that are overdue."""
        now = time.monotonic()
        closed = exchange.closing <= now
        overdue = [worker for worker in exchange.busy if closed or exchange.due[worker] <= now]
        failed = [msg for worker in overdue for msg in exchange.busy.pop(worker)]
        for worker in overdue:
            self._remove(worker, kill=True)
            exchange.idle += self._replacement()
        if closed:
            failed += exchange.waiting
            exchange.waiting.clear()
        for msg in failed:
            if closed:
                grace, reason = self._limits.grace, "not awaited"
                cause = f"{exchange.arrived} other clients had replied {grace:g} s before"
            else:
                cause, reason = f"no reply within {msg.deadline:g} s; its worker was killed", "late"
            exchange.held[msg.pid] = Failure(msg.pid, msg.phase, msg.step, cause, reason)

    def _take_replies(self, worker: Any, exchange: PoolExchange, clock: Clock) -> None:
        """Receive the worker's replies, or replace the worker if it has died."""
        messages = exchange.busy.pop(worker)
        try:
            with clock("upload"):
                replies = self._receive(worker)
            exchange.idle.append(worker)
        except (EOFError, OSError) as error:
            code = self._remove(worker)
            # If a batch system sends SIGTERM to all processes, wait until it reaches this one.
            if code in (-signal.SIGTERM, None):
                time.sleep(TOGETHER_SECONDS)
            exchange.idle += self._replacement()
            if isinstance(error, MachineLost) or len(messages) > 1:
                # It is not known whether one of the clients was the cause, so each is served alone.
                exchange.most = 1
                exchange.waiting.extendleft(reversed(messages))
                return
            cause = "its worker process died" + ("" if code is None else f" (exit code {code})")
            replies = [Failure(msg.pid, msg.phase, msg.step, cause) for msg in messages]
        for reply in replies:
            exchange.held[reply.pid] = reply
            exchange.arrived += isinstance(reply, Upload)
        if exchange.arrived == exchange.enough:
            exchange.closing = time.monotonic() + self._limits.grace

    # ---- for subclasses
    @abstractmethod
    def _begin(self, plan: list[Broadcast]) -> None:
        """Prepare a step with these messages."""

    @abstractmethod
    def _wait(self, busy: list[Any], seconds: float | None) -> list[Any]:
        """Wait at most `seconds`, and return the workers that have replied or died."""

    @abstractmethod
    def _send(self, worker: Any, messages: list[Broadcast]) -> Any:
        """Send to this worker, or to a new worker if this one has died since its last reply.

        Returns:
            The worker to which the messages were sent.
        """

    @abstractmethod
    def _receive(self, worker: Any) -> list[Reply]:
        """Return the worker's replies.

        Raises:
            MachineLost: its machine is lost; another worker gets its messages.
            EOFError, OSError: the worker has died.
        """

    @abstractmethod
    def _remove(self, worker: Any, *, kill: bool = False) -> int | None:
        """Clean up after a dead worker, or kill it. Return its exit code, or None if unknown."""

    @abstractmethod
    def _replacement(self) -> list[Any]:
        """Return a new worker in place of a removed one, or []."""


@dataclass
class Worker:
    """A worker process, as its parent sees it.

    Attributes:
        process: the process.
        reader: reads the worker's replies.
        replies: the path of the files with these replies.
    """

    process: BaseProcess
    reader: Reader
    replies: Path


class PoolTransport(Pool):
    """Worker processes on this machine, connected by pipes.

    Args:
        workers: how many processes to start.
        job: the run that they serve.
        folder: the folder for messages and clients' states.
    """

    def __init__(self, workers: int, job: Job, folder: Path) -> None:
        super().__init__(job.config.run.replies)
        self._job = job
        self._folder = folder
        self.store = DiskStore(folder)
        self._count = workers
        self._numbers = count(1)

    def __enter__(self) -> PoolTransport:
        self._writer = Writer(self._folder / "broadcast")
        if not self._can_fork():
            # The first spawned process would start this tracker, too, which unblocks signals.
            resource_tracker.ensure_running()
        try:
            for _ in range(self._count):
                self._start()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for connection in self._workers:
            connection.close()  # a worker ends when its pipe is closed
        deadline = time.monotonic() + (END_SECONDS if error is None else 0.0)
        for worker in self._workers.values():
            worker.process.join(timeout=max(0.0, deadline - time.monotonic()))
            worker.process.kill()  # nobody will read its replies any more
            worker.process.join()

    def _begin(self, plan: list[Broadcast]) -> None:
        self._written = {msg.pid: msg for msg in self._writer.write(plan)}

    def _wait(self, busy: list[Any], seconds: float | None) -> list[Any]:
        return wait(busy, seconds)

    def _receive(self, worker: Connection) -> list[Reply]:
        reply: Reply = worker.recv()
        if isinstance(reply, Upload):
            return [self._workers[worker].reader.message(reply)]
        return [reply]

    def _send(self, worker: Connection, messages: list[Broadcast]) -> Connection:
        (msg,) = messages
        try:
            worker.send(self._written[msg.pid])
        except OSError:
            self._remove(worker)
            worker = self._start()
            worker.send(self._written[msg.pid])
        return worker

    def _replacement(self) -> list[Connection]:
        return [self._start()]

    def _start(self) -> Connection:
        """Start a worker, and return this process's end of its pipe."""
        forked = self._can_fork()
        context: Any = multiprocessing.get_context("fork" if forked else "spawn")
        here, there = context.Pipe()
        # A forked worker inherits the parent's ends of all pipes, and must close them. While a copy
        # of an end is open, the worker at the other end cannot notice that the parent has ended.
        inherited = [*self._workers, here] if forked else []
        replies = self._folder / f"reply-{next(self._numbers)}"
        arguments = (there, self._job, self._folder, replies, inherited)
        process = context.Process(target=work, args=arguments, daemon=True)
        # Ctrl-C in a worker before `work`, or in the parent while it sends the arguments, would
        # make the worker print a traceback.
        with signals_deferred():
            process.start()
            there.close()
            # Copies, because the worker overwrites this reply with its next one.
            self._workers[here] = Worker(process, Reader(copy=True), replies)
        return here

    def _can_fork(self) -> bool:
        """Whether a worker may be a fork of this process, which shares the data at no cost.

        CUDA and the threads of OpenMP and autograd do not survive a fork. On a machine with a GPU,
        autograd starts its threads with the first gradient, even for a gradient on the CPU.
        """
        return (
            sys.platform == "linux"
            and self._job.workspace.device.type == "cpu"
            and self._job.config.run.engine.threads == 1
            and not any(name.startswith("pt_autograd") for name in thread_names())
        )

    def _remove(self, worker: Connection, *, kill: bool = False) -> int | None:
        removed = self._workers.pop(worker)
        if kill:
            removed.process.kill()
        for file in self._folder.glob(f"{removed.replies.name}.*"):
            file.unlink()
        worker.close()
        removed.process.join()
        return removed.process.exitcode


def work(
    connection: Connection, job: Job, folder: Path, replies: Path, inherited: list[Connection]
) -> None:
    """A worker process: serve messages until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and ends workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    end_with_parent()
    for other in inherited:
        other.close()
    pin_threads(job.config.run.engine.threads)
    store = DiskStore(folder)
    reader = Reader(copy=False)
    writer = Writer(replies)
    # The pipe is closed, or a reply was still unread when it was closed.
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            msg = connection.recv()
            try:
                reply: Reply = job.client(store).handle(reader.message(msg))
                if isinstance(reply, Upload):
                    (reply,) = writer.write([reply])
            # `handle` turns the client's own errors into Failures. This is an error of the worker,
            # such as a full disk.
            except Exception as error:
                log.debug("client %d", msg.pid, exc_info=True)
                reply = Failure(msg.pid, msg.phase, msg.step, f"{type(error).__name__}: {error}")
            connection.send(reply)
