"""Clients in worker processes, whose messages travel in shared memory."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fedhet.engines.shared import Reader, Writer
from fedhet.messages import Broadcast, Failure, Reply, Update, payload
from fedhet.process import pin_threads
from fedhet.server import Clock
from fedhet.state import DiskStore

if TYPE_CHECKING:
    from fedhet.job import Job

log = logging.getLogger("fedhet")
END_SECONDS = 5.0  # for a worker to end by itself
# of replies that wait for those before them; beyond it a worker waits too, where as many wait as
# there are workers
AHEAD_BYTES = 2**28


class PoolCourier:
    """Hands messages to worker processes, one at a time to each, and the next one as soon as a
    reply is in."""

    def __init__(self, workers: int, job: Job, folder: Path) -> None:
        # A forked worker shares the data at no cost, but CUDA, other platforms than Linux, and
        # OpenMP's threads cannot be forked: a child that computes with several of them would wait
        # for ever.
        self._forked = (
            sys.platform == "linux"
            and job.site.device.type == "cpu"
            and job.config.cfg.engine.threads == 1
        )
        self._context: Any = multiprocessing.get_context("fork" if self._forked else "spawn")
        self._job, self._folder, self._count = job, folder, workers
        self._workers: dict[Connection, Any] = {}
        self._reader: dict[Connection, Reader] = {}
        self._replies: dict[Connection, Path] = {}  # where a worker lays them
        self._started = 0

    def __enter__(self) -> PoolCourier:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._writer = Writer(self._folder / "broadcast")
        for _ in range(self._count):
            self._start()
        return self

    def __exit__(self, *error: object) -> None:
        for connection in self._workers:
            connection.close()  # a worker ends when its pipe does
        for process in self._workers.values():
            process.join(timeout=END_SECONDS)
            process.kill()
            process.join()

    def _start(self) -> Connection:
        here, there = self._context.Pipe()
        # A forked worker has copies of our ends of all pipes; with its own open it would never hear
        # that we have gone.
        inherited = [*self._workers, here] if self._forked else []
        self._started += 1
        self._replies[here] = self._folder / f"reply-{self._started}"
        arguments = (there, self._job, self._folder, self._replies[here], inherited)
        process = self._context.Process(target=_work, args=arguments, daemon=True)
        process.start()
        there.close()
        self._workers[here] = process
        self._reader[here] = Reader(copy=True)  # the worker writes its next reply over this one
        return here

    def exchange(self, plan: list[Broadcast], clock: Clock) -> Iterator[Reply]:
        waiting = list(range(len(plan)))[::-1]  # positions in the plan, the last one first
        done: dict[int, Reply] = {}  # replies that wait for their turn
        sizes = [0] * len(plan)  # their bytes
        busy: dict[Connection, int] = {}
        idle = list(self._workers)
        self._writer.clear()

        def feed() -> None:
            """Give every idle worker its next message, unless too many replies wait."""
            while idle and waiting and (len(done) < self._count or sum(sizes) < AHEAD_BYTES):
                at = waiting.pop()
                with clock("broadcast"):
                    connection = self._send(idle.pop(0), self._writer.message(plan[at]))
                    busy[connection] = at

        for position in range(len(plan)):
            feed()
            while position not in done:
                with clock("clients"):
                    ready = cast("list[Connection]", wait(list(busy)))
                for connection in ready:
                    at = busy.pop(connection)
                    try:
                        with clock("upload"):
                            done[at] = self._receive(connection)
                        idle.append(connection)
                    except (EOFError, OSError):
                        done[at] = self._died(connection, plan[at])
                        idle.append(self._start())
                    sizes[at] = _size(done[at])
                    feed()
            sizes[position] = 0
            yield done.pop(position)

    def _receive(self, connection: Connection) -> Reply:
        reply = connection.recv()
        return self._reader[connection].message(reply) if isinstance(reply, Update) else reply

    def _send(self, connection: Connection, message: Any) -> Connection:
        """Send to this worker, or to a new one where it has died while it had nothing to do."""
        try:
            connection.send(message)
        except OSError:
            self._bury(connection)
            connection = self._start()
            connection.send(message)
        return connection

    def _bury(self, connection: Connection) -> int | None:
        process = self._workers.pop(connection)
        del self._reader[connection]
        for file in self._folder.glob(f"{self._replies.pop(connection).name}.*"):
            file.unlink()
        connection.close()
        process.join()
        code: int | None = process.exitcode
        return code

    def _died(self, connection: Connection, msg: Broadcast) -> Failure:
        return Failure(
            msg.pid,
            msg.phase,
            msg.step,
            f"its worker process died (exit code {self._bury(connection)})",
        )


def _size(reply: Reply) -> int:
    """The bytes of a reply that waits for its turn."""
    if isinstance(reply, Failure):
        return 0
    return sum(payload("weights", reply.weights, reply.extras).values())


def _work(
    connection: Connection, job: Job, folder: Path, replies: Path, inherited: list[Connection]
) -> None:
    """A worker process: serve messages until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in inherited:
        other.close()
    pin_threads(job.config.cfg.engine.threads)
    store, reader, writer = DiskStore(folder), Reader(copy=False), Writer(replies)
    while True:
        try:
            msg = connection.recv()
        except EOFError:
            return
        writer.clear()
        try:
            reply: Reply = job.client(store).handle(reader.message(msg))
            found = writer.message(reply) if isinstance(reply, Update) else reply
        # the client's own are replies already: these are the worker's, a full disk among them
        except Exception as error:
            log.debug("client %d", msg.pid, exc_info=True)
            found = Failure(msg.pid, msg.phase, msg.step, f"{type(error).__name__}: {error}")
        connection.send(found)
