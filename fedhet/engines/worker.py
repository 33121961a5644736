"""A worker process: what it does from its start to its end."""

from __future__ import annotations

import logging
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from fedhet.core.messages import Failure, Reply, Update
from fedhet.engines.shared import Reader, Writer
from fedhet.process import SIGNALS, end_with_parent, pin_threads
from fedhet.stores import DiskStore

if TYPE_CHECKING:
    from fedhet.job import Job

log = logging.getLogger("fedhet")


def work(
    connection: Connection, job: Job, folder: Path, replies: Path, inherited: list[Connection]
) -> None:
    """A worker process: serve messages until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    end_with_parent()
    for other in inherited:
        other.close()
    pin_threads(job.config.run.engine.threads)
    store = DiskStore(folder)
    reader = Reader(copy=False)
    writer = Writer(replies)
    while True:
        try:
            msg = connection.recv()
        except (EOFError, ConnectionResetError):  # the latter if a reply was still unread
            return
        writer.clear()
        try:
            reply: Reply = job.client(store).handle(reader.message(msg))
            if isinstance(reply, Update):
                reply = writer.message(reply)
        # The client's own errors are Failures by now. This is one of the worker, such as a full
        # disk.
        except Exception as error:
            log.debug("client %d", msg.pid, exc_info=True)
            reply = Failure(msg.pid, msg.phase, msg.step, f"{type(error).__name__}: {error}")
        try:
            connection.send(reply)
        except (BrokenPipeError, ConnectionResetError):  # the run has ended meanwhile
            return
