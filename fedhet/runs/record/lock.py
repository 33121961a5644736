"""Creates a new run folder, and locks it.

The lock distinguishes a run that is still running from a run that was killed.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fedhet.core.errors import ConfigError, log, uncreatable
from fedhet.core.server.callbacks import Callback

if TYPE_CHECKING:
    from fedhet.core.server.loop import Loop

LOCK = ".lock"  # the file exists until the run has done everything
_held: set[Path] = set()  # locks of this process; the system would let it take them again


class Lock(Callback):
    """A lock on a run folder, held from its creation until `release` or the end of the process.

    Forked processes do not inherit it.

    Args:
        folder: the run folder.
        what: what is running in the folder, for the error.

    Raises:
        ConfigError: another run, in this or another process, holds the lock, or the folder cannot
            be written to.
    """

    def __init__(self, folder: Path, what: str = "run") -> None:
        self._path = folder.resolve() / LOCK
        running = ConfigError(f"{self._path.parent}: this {what} is still running; stop it first")
        if self._path in _held:
            raise running
        while True:
            try:
                self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError as error:
                raise uncreatable("the lock of a run", folder, error) from error
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_current():
                    break
            except (BlockingIOError, PermissionError):
                os.close(self._descriptor)
                raise running from None
            except OSError as error:  # a network file system without locks
                log.warning(
                    "%s cannot be locked (%s): make sure that nobody resumes a run in it while"
                    " another one is running",
                    folder,
                    error.strerror,
                )
                break
            os.close(self._descriptor)  # the previous holder has removed the file
        _held.add(self._path)

    def _is_current(self) -> bool:
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._descriptor), self._path.stat())
        return False

    def ended(self, loop: Loop, status: str, error: BaseException | None) -> None:
        self.release()

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._path in _held:
            _held.discard(self._path)
            with suppress(OSError):
                self._path.unlink()
            os.close(self._descriptor)


def claim(folder: Path, explicit: bool) -> Path:
    """Create the run folder.

    Args:
        folder: its path.
        explicit: whether the user named it. If the user did not, and the folder already holds a
            run, the next free name `<folder>-2`, `<folder>-3`, ... is used.

    Raises:
        ConfigError: the user named a folder that already holds a run, or it cannot be created.
    """
    base = folder.resolve()
    count, folder = 1, base
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Atomic: if two runs start in the same second, only one of them succeeds.
            (folder / "summary.json").open("x").close()
            return folder
        except OSError as error:
            if not isinstance(error, FileExistsError) or not folder.is_dir():
                raise uncreatable("hydra.run.dir", folder, error) from error
        if explicit:
            raise ConfigError(
                f"hydra.run.dir={folder}: that folder already holds a run; name another folder, or"
                f" continue the run with resume={folder}"
            )
        count += 1
        folder = base.with_name(f"{base.name}-{count}")
