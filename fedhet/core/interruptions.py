"""What ends work from outside: a signal, or a deadline."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from fedhet.core.errors import RunFailed

_interruptions: list[int] = []  # the signals that `interrupt` has taken
_handled: list[bool] = []  # one entry for each block in which `interrupt` handles the signals


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


@contextmanager
def signals_noted() -> Iterator[None]:
    """Say that `interrupt` handles the signals inside the block; it forgets them at its end."""
    _handled.append(True)
    try:
        yield
    finally:
        _handled.pop()
        forget_interruptions()


@contextmanager
def exits_as_errors() -> Iterator[None]:
    """Let what would end this process be an error, where code of the run has raised it.

    That is a SystemExit, a KeyboardInterrupt without a signal, and all else that is no Exception.
    Where signals are not noted, nobody knows whether it was a signal, and it passes.

    Raises:
        RunFailed: code of the run has raised such an exception.
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
    """The time is over. It is no Exception, so that the work itself does not catch it."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """End the block after so many seconds; None for no limit.

    In the main thread, this also interrupts a call that waits. In another thread, Python gets to it
    when the current call returns.

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
        raise TimeoutError(f"the work took longer than {seconds:g} s, its deadline") from None


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
        # An exception that is under way arrives in this loop at the latest. To withdraw it instead
        # would make Python 3.11 spin for ever where the thread is traced, by coverage for example.
        for _ in range(2):
            pass
