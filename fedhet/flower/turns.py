"""Runs of one SuperLink take turns: one that is submitted during another waits for its end."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path
from threading import Thread
from typing import TextIO

from fedhet.core.errors import ConfigError, clean

log = logging.getLogger("fedhet")
QUEUE = "FEDHET_QUEUE"  # names a file that is locked by the run whose turn it is
WAITS = "waiting for the end of"
SECONDS = 1.0  # within which a run that waits notices that it is stopped
_held: list[TextIO] = []  # open until this process ends, and with it the run


def take_turn(run: int) -> None:
    """Wait until no other run with the same queue is in progress.

    Runs wait in the order in which their server apps reach the lock, which is not always that of
    submission; one that reaches it just as a run ends may begin before those that wait.

    The turn ends with this process, however that ends: a run that was killed is in nobody's way.
    Without `FEDHET_QUEUE` in the environment, nothing is waited for.

    Args:
        run: Flower's id of this run.

    Raises:
        ConfigError: the file cannot be written to or locked.
    """
    path = os.environ.get(QUEUE)
    if not path:
        return
    try:
        file = Path(path).open("a+", encoding="utf-8")  # noqa: SIM115 -- until the process ends
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            # Empty between the lock and the writing below.
            number = clean(file.read(40))
            log.info("%s %s", WAITS, f"run {number}" if number else "another run")
            # In a thread, so that `flwr stop` ends the wait: Flower's signal to this process does
            # not interrupt a system call.
            waiting = Thread(target=fcntl.lockf, args=(file, fcntl.LOCK_EX), daemon=True)
            waiting.start()
            while waiting.is_alive():
                waiting.join(SECONDS)
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ours by now, or it raises
        file.truncate(0)
        file.write(str(run))
        file.flush()
    except OSError as error:
        raise ConfigError(f"{QUEUE}={path}: cannot be locked: {error.strerror}") from error
    _held.append(file)
