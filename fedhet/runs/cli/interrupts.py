"""Ctrl-C and SIGTERM end a command, even if a library loses the first one."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from fedhet.core import interruptions


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM act like Ctrl-C inside the block, and have neither of them lost.

    A KeyboardInterrupt is lost in a `__del__`, in the callback of a weak reference, of which every
    import has one, and in the start of many C extensions. `raise_if_interrupted` raises
    it again. A library that it stops halfway may fail with an error of its own in its place.

    Raises:
        KeyboardInterrupt: the block has raised an error after a signal.
    """
    handlers = {signal.SIGTERM: signal.signal(signal.SIGTERM, interruptions.interrupt)}
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as for a script's background job
        handlers[signal.SIGINT] = signal.signal(signal.SIGINT, interruptions.interrupt)
    report = sys.unraisablehook

    def report_others(dropped: sys.UnraisableHookArgs) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            report(dropped)

    sys.unraisablehook = report_others
    try:
        with interruptions.signals_noted():
            try:
                yield
            except Exception:
                interruptions.raise_if_interrupted()
                raise
    finally:
        sys.unraisablehook = report
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
