"""Ends of work from outside: by a signal, or by a deadline."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from fedhet.core.errors import RunFailed

_interruptions: list[int] = []  # the signals that `interrupt` has handled
_handled: list[bool] = []  # one entry for each block in which `interrupt` handles the signals


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Handle a signal like Ctrl-C, and remember it."""
    _interruptions.append(number)
    raise KeyboardInterrupt


def raise_if_interrupted() -> None:
    """Raise KeyboardInterrupt if a signal has come, but some code let the work continue."""
    if _interruptions:
        raise KeyboardInterrupt


@contextmanager
def signals_noted() -> Iterator[None]:
    """Note that `interrupt` handles the signals inside the block, and forget them at its end."""
    _handled.append(True)
    try:
        yield
    finally:
        _handled.pop()
        _interruptions.clear()  # before this process does other work


@contextmanager
def exits_as_errors() -> Iterator[None]:
    """Convert exceptions that would end this process into RunFailed, if the run's code raised them.

    These are SystemExit, KeyboardInterrupt without a signal, and all others that are no Exception.
    Outside `signals_noted`, nobody knows whether a signal came; then the exception passes
    unchanged.

    Raises:
        RunFailed: the run's code raised such an exception.
    """
    try:
        yield
    except (Exception, GeneratorExit):
        raise
    except BaseException as error:
        if _interruptions or not _handled:
            raise
        raise RunFailed(f"{error!r}: code of the run tried to end its process") from error


class _Expired(BaseException):
    """The time is over. It is no Exception, so the work itself does not catch it."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """End the block after this number of seconds; None for no limit.

    In the main thread, this also interrupts a call that waits. In another thread, Python raises the
    error only when the current call returns.

    Raises:
        TimeoutError: the block took longer.
    """
    if seconds is None:
        yield
        return
    limit = _alarm if threading.current_thread() is threading.main_thread() else _thread_timer
    try:
        with limit(seconds):
            yield
    except _Expired:
        raise TimeoutError(f"the work took longer than its deadline, {seconds:g} s") from None


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def expire(*_: object) -> None:
        raise _Expired

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _thread_timer(seconds: float) -> Iterator[None]:
    ident = ctypes.c_ulong(threading.get_ident())
    raise_in_thread = ctypes.pythonapi.PyThreadState_SetAsyncExc
    lock = threading.Lock()
    done = False

    def expire() -> None:
        with lock:
            if not done:
                raise_in_thread(ident, ctypes.py_object(_Expired))

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with lock:
            done = True
        # If the exception is under way, it arrives in this loop at the latest. Withdrawing it
        # instead would make Python 3.11 spin for ever in a traced thread (by coverage, say).
        for _ in range(2):
            pass
