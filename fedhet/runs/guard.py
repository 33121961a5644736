"""Removes temporary folders, and ends the processes that use them, even after a run was killed.

No process can react to its own SIGKILL. So for each folder a small process, the guard, waits for
the end of a pipe. The kernel closes the pipe when the owner and all its forks have ended. A process
without such a folder can have a guard that only ends its children.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid

TAG = "FEDHET_FOLDER"  # processes that inherit it, with our folder or name in it, end with us
SECONDS = 10.0  # how long the guard tries
GRACE_SECONDS = 1.5  # for children to end after SIGTERM
PAUSE_SECONDS = 0.1  # between two checks for remaining processes
DISMISSED = b"."  # tells the guard that its folder is cleaned up


_guards: list[subprocess.Popen[bytes]] = []  # keeps the guards' pipes open


def guard_children() -> None:
    """Make processes started from here on exit soon after this process, even if it is killed."""
    name = uuid.uuid4().hex
    _guards.append(_started(name, GRACE_SECONDS))
    os.environ[TAG] = name


def _started(name: str, grace: float = 0.0) -> subprocess.Popen[bytes]:
    """Start a guard for the folder `name` and the processes that have `name` in their environment.

    Args:
        name: the folder, or any other name if there is no folder.
        grace: seconds for the processes to end by themselves.
    """
    # -P, because some modules next to this file have the names of packages.
    return subprocess.Popen(
        [sys.executable, "-P", __file__, name, str(grace)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # so that Ctrl-C does not reach it
    )


class TemporaryFolder(tempfile.TemporaryDirectory[str]):
    """A temporary folder that is removed when this process has ended, or before.

    Args:
        prefix: the beginning of its name.

    Attributes:
        environment: variables for processes that must not outlive this one.
    """

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix=prefix, ignore_cleanup_errors=True)
        self.environment = {TAG: self.name}
        self._guard = _started(self.name)

    def end_processes(self) -> None:
        """Kill the processes that have inherited `environment`."""
        _end_users(self.name)

    def cleanup(self) -> None:
        """Remove the folder, and dismiss the guard."""
        super().cleanup()
        with contextlib.suppress(BrokenPipeError):
            self._guard.communicate(DISMISSED)


def _guard(folder: str, grace: float) -> None:
    """Wait until the folder's owner has ended, then end its processes and remove the folder."""
    if grace:
        import psutil  # noqa: F401 -- takes seconds on a busy machine, so it is imported early
    if sys.stdin.buffer.read(1):
        return
    _end_users(folder, grace)
    deadline = time.monotonic() + SECONDS
    while os.path.exists(folder) and time.monotonic() < deadline:  # noqa: PTH110 -- a quick start
        _end_users(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _end_users(folder: str, grace: float = 0.0) -> None:
    """End the folder's processes; repeat until none is left, since one may have started another.

    It first asks them to end (SIGTERM), and kills those that still run after `grace` seconds. It
    looks twice for the last ones: a process that is being started has no environment for a moment.
    """
    import psutil  # here, so that a guard takes little time and memory

    until = time.monotonic() + grace
    asked: set[int] = set()
    looks = 2
    while looks and time.monotonic() < until + SECONDS:
        looks -= 1
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it has ended, or belongs to another user
                if process.environ().get(TAG) != folder:
                    continue
                looks = 2
                if time.monotonic() >= until:
                    process.kill()
                elif process.pid not in asked:
                    asked.add(process.pid)
                    process.terminate()
        if time.monotonic() < until:
            time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    _guard(sys.argv[1], float(sys.argv[2]))
