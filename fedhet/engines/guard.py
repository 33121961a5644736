"""Temporary folders, and processes that belong to them, which do not outlive a killed run.

Nothing in a process can act on its own SIGKILL. So for each folder a small process, the guard,
waits at a pipe, which the kernel closes when the owner and all its forks have ended.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time

TAG = "FEDHET_FOLDER"  # a process that inherits it, with the folder as its value, ends with us
SECONDS = 10.0  # how long the guard tries
DISMISSED = b"."  # tells the guard that its folder is cleaned up


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
        # -P, because the modules beside this file have the names of packages.
        self._guard = subprocess.Popen(
            [sys.executable, "-P", __file__, self.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is not for it
        )

    def end_processes(self) -> None:
        """Kill the processes that have inherited `environment`."""
        _end_users(self.name)

    def cleanup(self) -> None:
        """Remove the folder, and dismiss the guard."""
        super().cleanup()
        with contextlib.suppress(BrokenPipeError):
            self._guard.communicate(DISMISSED)


def _guard(folder: str) -> None:
    """Wait for the end of the process that owns the folder, and clean up what it has left."""
    if sys.stdin.buffer.read(1):
        return
    deadline = time.monotonic() + SECONDS
    while os.path.exists(folder) and time.monotonic() < deadline:  # noqa: PTH110 -- a quick start
        _end_users(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _end_users(folder: str) -> None:
    """Kill the folder's processes until there are none: one may just have started another."""
    import psutil  # here, so that a guard takes little time and memory

    deadline = time.monotonic() + SECONDS
    found = True
    while found and time.monotonic() < deadline:
        found = False
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile, or is another user's
                if process.environ().get(TAG) == folder:
                    process.kill()
                    found = True


if __name__ == "__main__":
    _guard(sys.argv[1])
