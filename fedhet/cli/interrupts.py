"""Ctrl-C and SIGTERM end a command, even if Python loses the first one."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

AGAIN_SECONDS = 0.01  # by then, what lost the interruption has returned


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM act like Ctrl-C, and lose neither of them inside the block.

    Python drops an exception that leaves a `__del__` or the callback of a weak reference, of which
    every import has one. A KeyboardInterrupt that it drops is raised again.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    before = sys.unraisablehook

    def hook(dropped: sys.UnraisableHookArgs) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            # A plain thread: those of `threading` take locks that the main thread may hold here.
            _thread.start_new_thread(again, ())
        else:
            before(dropped)

    def again() -> None:
        time.sleep(AGAIN_SECONDS)
        if sys.unraisablehook is hook:
            signal.pthread_kill(threading.main_thread().ident or 0, _signal_to_raise())

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def _signal_to_raise() -> signal.Signals:
    """SIGINT, unless this process ignores it, as one in the background of a script does."""
    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    return signal.SIGTERM if ignored else signal.SIGINT
