"""What ends work from outside: a signal, or a deadline."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_interruptions: list[int] = []  # the signals that `interrupt` has taken


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Handle a signal like Ctrl-C, and remember it."""
    _interruptions.append(number)
    raise KeyboardInterrupt


def forget_interruptions() -> None:
    """End a command: its signals do not concern what this process does next."""
    _interruptions.clear()


def raise_if_interrupted() -> None:
    """Raise KeyboardInterrupt where a signal has come but the work goes on all the same."""
    if _interruptions:
        raise KeyboardInterrupt


class _Expired(BaseException):
    """The time is over. It is no Exception, so that the work itself does not catch it."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """End the block after so many seconds, also while a call in it waits; None for no limit.

    Raises:
        TimeoutError: the block took longer.
        ValueError: this is not the main thread, which alone can be interrupted.
    """
    if seconds is None:
        yield
        return

    def expire(*_: object) -> None:
        raise _Expired

    before = signal.signal(signal.SIGALRM, expire)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    except _Expired:
        raise TimeoutError(f"the work took longer than {seconds:g} s, its deadline") from None
