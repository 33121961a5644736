"""`deploy run`: start the Flower process of a server or a site, and watch a SuperNode.

A SuperNode can be alive and yet disconnected, for example if the thread that sends its heartbeats
has ended, or if a connection hangs. systemd and Docker do not notice that, so this process asks
the SuperLink whether the node is online.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from fedhet.core.errors import RunFailed
from fedhet.data.storage import write_text
from fedhet.deploy import checks, folders, superlink
from fedhet.runs.flower_commands import BIN
from fedhet.runs.process import end_with_parent

log = logging.getLogger("fedhet.deploy")
EVERY = 60.0  # seconds between two looks
PATIENCE = 3  # the SuperNode is ended after so many looks in a row that do not find it online
END_SECONDS = 20.0  # a SuperNode must end within this time after SIGTERM
_ID = re.compile(r"SuperNode ID: (\d+)")  # a SuperNode prints this when it has connected


def run(place: folders.ServerFolder | folders.SiteFolder) -> int:
    """Start the SuperLink or the SuperNode and return its exit code.

    Args:
        place: the server or the site.

    Raises:
        WriteError: the folder for the state cannot be used.
        RunFailed: another process holds the port, or the program cannot be started.
    """
    if process := checks.holder(place.port):
        raise RunFailed(
            f"{place.folder}: port {place.port} is held by {process}: end it, or name another port"
            f" in {place.FILE}"
        )
    variables = folders.environment(place)
    home = place.state / "flwr"
    write_text(home / "config.toml", folders.connection(place.server, place.folder / "ca.crt"))
    log.info("starting: %s", " ".join(place.command))
    if isinstance(place, folders.ServerFolder):  # the SuperLink replaces this process
        os.execve(place.command[0], place.command, variables)
    return supervise(
        place.command,
        variables,
        lambda: {node.id: node.status for node in superlink.nodes(home)},
    )


def supervise(
    command: Sequence[str],
    variables: Mapping[str, str],
    ask: Callable[[], Mapping[str, str]],
    every: float = EVERY,
) -> int:
    """Run a SuperNode until it ends; end it if it is alive but not online for too long.

    If the SuperLink does not answer, do nothing: a SuperNode reconnects without help. If the
    SuperLink refuses a SuperNode, the SuperNode ends, and systemd or Docker starts it again.

    Args:
        command: the SuperNode's command line.
        variables: its environment.
        ask: returns node id -> status, or raises RunFailed if the SuperLink does not answer.
        every: the seconds between two looks.

    Returns:
        The SuperNode's exit code, or 1 if this function has ended it.

    Raises:
        RunFailed: the SuperNode cannot be started.
    """
    try:
        process = subprocess.Popen(
            [str(BIN / command[0]), *command[1:]],
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=partial(end_with_parent, os.getpid()),
        )
    except OSError as error:
        raise RunFailed(f"{BIN / command[0]} cannot be started: {error.strerror}") from error
    ids: list[str] = []
    reader = threading.Thread(target=_pass_on, args=(process, ids), daemon=True)
    reader.start()
    missed = 0
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(every)
                reader.join(1)  # to print its last lines
                return code
            try:
                status = ask().get(ids[-1] if ids else "", "unknown")
            except RunFailed as error:
                log.warning("the server does not answer whether this site is online: %s", error)
                missed = 0
                continue
            missed = 0 if status == "online" else missed + 1
            if missed:
                log.warning(
                    "the SuperNode is running, but the server sees it as %s (%d of %d)",
                    *(status, missed, PATIENCE),
                )
            if missed == PATIENCE:
                log.error("ending the SuperNode, so that systemd or Docker starts it again")
                return 1
    finally:
        _end(process)


def _pass_on(process: subprocess.Popen[str], ids: list[str]) -> None:
    """Pass the SuperNode's output on, and note the node ids under which it has connected."""
    assert process.stdout is not None
    for line in process.stdout:
        ids.extend(_ID.findall(line))
        with suppress(OSError):
            sys.stdout.write(line)
            sys.stdout.flush()


def _end(process: subprocess.Popen[str]) -> None:
    """End the SuperNode, and the remaining processes of its group."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning("the SuperNode did not end within %g s; killing it", END_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
