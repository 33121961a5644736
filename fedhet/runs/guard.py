"""Temporary folders, and processes that belong to them, which do not outlive a killed run.

Nothing in a process can act on its own SIGKILL. So for each folder a small process, the guard,
waits at a pipe, which the kernel closes when the owner and all its forks have ended. A process
without such a folder can have a guard for its children alone.
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

TAG = "FEDHET_FOLDER"  # a process that inherits it, with our folder or name in it, ends with us
SECONDS = 10.0  # how long the guard tries
GRACE_SECONDS = 1.5  # for children to end after SIGTERM
PAUSE_SECONDS = 0.1  # between two looks at whether they have
DISMISSED = b"."  # tells the guard that its folder is cleaned up


_guards: list[subprocess.Popen[bytes]] = []  # as long as they exist, their pipes are open


def guard_children() -> None:
    """Let what this process starts from now on end soon after it, in whatever way that ends."""
    name = uuid.uuid4().hex
    _guards.append(_started(name, GRACE_SECONDS))
    os.environ[TAG] = name


def _started(name: str, grace: float = 0.0) -> subprocess.Popen[bytes]:
    """A guard for the processes that have `name` in their environment, and a folder of that name.

    Args:
        name: the folder, or another name.
        grace: how many seconds the processes have to end by themselves.
    """
    # -P, because the modules beside this file have the names of packages.
    return subprocess.Popen(
        [sys.executable, "-P", __file__, name, str(grace)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is not for it
    )


class TemporaryFolder(tempfile.TemporaryDirectory[str]):
    """A temporary folder that is removed at the latest when this process has ended.

    Args:
        prefix: what its name begins with.

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
    """Wait for the end of the process that owns the folder, and clean up what it has left."""
    if grace:
        import psutil  # noqa: F401 -- it takes seconds on a busy machine, which count later
    if sys.stdin.buffer.read(1):
        return
    _end_users(folder, grace)
    deadline = time.monotonic() + SECONDS
    while os.path.exists(folder) and time.monotonic() < deadline:  # noqa: PTH110 -- a quick start
        _end_users(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _end_users(folder: str, grace: float = 0.0) -> None:
    """End the folder's processes until there are none: one may just have started another."""
    import psutil  # here, so that a guard takes little time and memory

    until = time.monotonic() + grace
    asked: set[int] = set()
    found = True
    while found and time.monotonic() < until + SECONDS:
        found = False
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile, or is another user's
                if process.environ().get(TAG) != folder:
                    continue
                found = True
                if time.monotonic() >= until:
                    process.kill()
                elif process.pid not in asked:
                    asked.add(process.pid)
                    process.terminate()
        if time.monotonic() < until:
            time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    _guard(sys.argv[1], float(sys.argv[2]))
