"""The courier to clients in worker processes, whose messages travel in shared memory."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fedhet.core.loop import Clock
from fedhet.core.messages import Broadcast, Failure, Reply, payload
from fedhet.engines.shared import Reader, Writer
from fedhet.engines.worker import work
from fedhet.process import TOGETHER_SECONDS, signals_deferred, thread_names
from fedhet.stores import DiskStore

if TYPE_CHECKING:
    from fedhet.job import Job

log = logging.getLogger("fedhet")
END_SECONDS = 3.0  # how long the workers may take to end before they are killed
# Bytes of replies that are received but whose turn has not come. Beyond them no further message is
# handed out, as long as at least as many replies are held as there are workers.
AHEAD_BYTES = 2**28


@dataclass
class Worker:
    """A worker process, as its parent sees it.

    Attributes:
        process: the process.
        reader: reads its replies.
        replies: the path of the files to which it writes them.
    """

    process: Any
    reader: Reader
    replies: Path


@dataclass
class PoolExchange:
    """Where the messages of one step are; each is known by its position in the plan.

    Attributes:
        waiting: the messages that no worker has had yet, the first one last.
        idle: the workers without a message.
        busy: worker -> its message.
        due: worker -> when it must have replied, on the monotonic clock.
        held: the replies whose turn has not come.
        held_bytes: their size.
    """

    waiting: list[int]
    idle: list[Connection]
    busy: dict[Connection, int] = field(default_factory=dict)
    due: dict[Connection, float] = field(default_factory=dict)
    held: dict[int, Reply] = field(default_factory=dict)
    held_bytes: int = 0

    def overdue(self) -> list[Connection]:
        """The workers that should have replied by now."""
        now = time.monotonic()
        return [connection for connection in self.busy if self.due[connection] <= now]

    @property
    def seconds_left(self) -> float | None:
        """Until the next worker is overdue; None if none ever is."""
        soonest = min((self.due[connection] for connection in self.busy), default=inf)
        return None if soonest == inf else max(0.0, soonest - time.monotonic())

    def hold(self, position: int, reply: Reply) -> None:
        self.held[position] = reply
        self.held_bytes += _size(reply)

    def release(self, position: int) -> Reply:
        reply = self.held.pop(position)
        self.held_bytes -= _size(reply)
        return reply


class PoolCourier:
    """Gives each worker process one message at a time, and the next as soon as it has replied.

    Args:
        workers: how many processes to start.
        job: what each of them serves.
        folder: where messages and clients' states are kept.
    """

    def __init__(self, workers: int, job: Job, folder: Path) -> None:
        self._job = job
        self._folder = folder
        self.store = DiskStore(folder)
        self._count = workers
        self._grace = job.config.run.replies.grace
        self._workers: dict[Connection, Worker] = {}
        self._started = 0

    def __enter__(self) -> PoolCourier:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._writer = Writer(self._folder / "broadcast")
        if not self._can_fork():
            # The first process to be spawned would start this one too, which unblocks signals.
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
            worker.process.kill()  # nobody will read the rest of its work
            worker.process.join()

    def exchange(self, plan: list[Broadcast], clock: Clock) -> Iterator[Reply]:
        self._writer.clear()
        exchange = PoolExchange(waiting=list(reversed(range(len(plan)))), idle=list(self._workers))
        for position in range(len(plan)):
            self._hand_out(exchange, plan, clock)
            while position not in exchange.held:
                with clock("clients"):
                    ready = cast(
                        "list[Connection]", wait(list(exchange.busy), exchange.seconds_left)
                    )
                if not ready:
                    self._end_overdue(exchange, plan)
                for connection in ready:
                    self._take_reply(connection, exchange, plan, clock)
                    self._hand_out(exchange, plan, clock)
            yield exchange.release(position)

    def _hand_out(self, exchange: PoolExchange, plan: list[Broadcast], clock: Clock) -> None:
        """Give every idle worker its next message, unless too many replies wait for their turn."""
        while exchange.idle and exchange.waiting:
            if len(exchange.held) >= self._count and exchange.held_bytes >= AHEAD_BYTES:
                return
            position = exchange.waiting.pop()
            with clock("broadcast"):
                message = self._writer.message(plan[position])
                connection = self._send(exchange.idle.pop(0), message)
            exchange.busy[connection] = position
            seconds = plan[position].deadline
            # A client ends its work itself at the deadline, unless it hangs outside of Python.
            exchange.due[connection] = (
                inf if seconds is None else time.monotonic() + seconds + self._grace
            )

    def _end_overdue(self, exchange: PoolExchange, plan: list[Broadcast]) -> None:
        """Kill and replace the workers whose time is over."""
        for connection in exchange.overdue():
            position = exchange.busy.pop(connection)
            self._workers[connection].process.kill()
            self._remove(connection)
            msg = plan[position]
            cause = f"no reply within {msg.deadline:g} s; its worker was killed"
            exchange.hold(position, Failure(msg.pid, msg.phase, msg.step, cause, "late"))
            exchange.idle.append(self._start())

    def _take_reply(
        self, connection: Connection, exchange: PoolExchange, plan: list[Broadcast], clock: Clock
    ) -> None:
        """Receive the worker's reply, or replace the worker if it has died."""
        position = exchange.busy.pop(connection)
        reply: Reply
        try:
            with clock("upload"):
                reply = self._receive(connection)
        except (EOFError, OSError):
            msg, code = plan[position], self._remove(connection)
            if code == -signal.SIGTERM:  # as of a batch system, which sends it to us too
                time.sleep(TOGETHER_SECONDS)
            cause = f"its worker process died (exit code {code})"
            reply = Failure(msg.pid, msg.phase, msg.step, cause)
            connection = self._start()
        exchange.hold(position, reply)
        exchange.idle.append(connection)

    def _receive(self, connection: Connection) -> Reply:
        reply: Reply = connection.recv()
        if isinstance(reply, Failure):
            return reply
        return self._workers[connection].reader.message(reply)

    def _send(self, connection: Connection, message: Broadcast) -> Connection:
        """Send to this worker, or to a new one if it has died since its last reply."""
        try:
            connection.send(message)
        except OSError:
            self._remove(connection)
            connection = self._start()
            connection.send(message)
        return connection

    def _start(self) -> Connection:
        """Start a worker, and return this process's end of its pipe."""
        forked = self._can_fork()
        context: Any = multiprocessing.get_context("fork" if forked else "spawn")
        here, there = context.Pipe()
        # A forked worker inherits our ends of all pipes, and must close them: while one is open
        # somewhere, the worker at its other end cannot notice that we have ended.
        inherited = [*self._workers, here] if forked else []
        self._started += 1
        replies = self._folder / f"reply-{self._started}"
        arguments = (there, self._job, self._folder, replies, inherited)
        process = context.Process(target=work, args=arguments, daemon=True)
        # A worker that Ctrl-C met before `work` would print a traceback, as would one whose parent
        # it keeps from sending what the worker is to do.
        with signals_deferred():
            process.start()
            there.close()
            # Copies, because the worker writes its next reply over this one.
            self._workers[here] = Worker(process, Reader(copy=True), replies)
        return here

    def _can_fork(self) -> bool:
        """Whether a worker may be a fork, which shares the data at no cost.

        CUDA, OpenMP's threads and those of autograd do not survive a fork. Autograd starts its own
        with the first gradient on a machine with a GPU, even one that is computed on the CPU.
        """
        return (
            sys.platform == "linux"
            and self._job.workspace.device.type == "cpu"
            and self._job.config.run.engine.threads == 1
            and not any(name.startswith("pt_autograd") for name in thread_names())
        )

    def _remove(self, connection: Connection) -> int | None:
        """Clean up after a worker that has died, and return its exit code."""
        worker = self._workers.pop(connection)
        for file in self._folder.glob(f"{worker.replies.name}.*"):
            file.unlink()
        connection.close()
        worker.process.join()
        code: int | None = worker.process.exitcode
        return code


def _size(reply: Reply) -> int:
    """The bytes of a reply."""
    if isinstance(reply, Failure):
        return 0
    return sum(payload("weights", reply.weights, reply.extras).values())
