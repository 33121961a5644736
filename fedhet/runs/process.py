"""Settings of the current process: garbage collection around imports, threads, and the device."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhet.core.errors import ConfigError
from fedhet.core.interruptions import raise_if_interrupted

if TYPE_CHECKING:
    import torch

SIGNALS = (signal.SIGINT, signal.SIGTERM)
TOGETHER_SECONDS = 1.0  # after a signal has ended one process of a run, in which it may end the run
LOOPBACK = ("127.0.0.1", "localhost", "::1")
PR_SET_PDEATHSIG = 1  # of Linux's prctl
STDERR = 2  # the file descriptor; Ray replaces sys.stderr


@contextmanager
def imports() -> Iterator[None]:
    """Import heavy packages faster, in a process that belongs to fedhet.

    Imported modules stay, so searching them for garbage is wasted time. Nothing is collected inside
    the block, which makes the import of torch a fifth faster, and everything that exists at its end
    is excluded from later collections. At the end of the process the remaining objects are excluded
    too: that last collection takes a second with torch and Flower.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(_freeze_at_exit)
    raise_if_interrupted()


def _freeze_at_exit() -> None:
    # triton's bindings report every object that was not collected as a leak, in fifty lines.
    if "triton" in sys.modules:
        gc.unfreeze()
    else:
        gc.freeze()


def pin_threads(threads: int) -> None:
    """Set the number of threads for arithmetic in this process.

    It determines the last bits of every sum.
    """
    import torch
    from threadpoolctl import threadpool_limits

    torch.set_num_threads(threads)
    threadpool_limits(limits=threads)


@contextmanager
def pinned_threads(threads: int) -> Iterator[None]:
    """Set the number of threads inside the block; a notebook gets its own number back."""
    import torch
    from threadpoolctl import threadpool_limits

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with threadpool_limits(limits=threads):
            yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def exit_after(seconds: float | None) -> Iterator[None]:
    """End this process if the block takes longer, and write to stderr where it was.

    That works whatever hangs in it, also what keeps Python's threads from running. Only for a
    process that serves one client.
    """
    if seconds is None:
        yield
        return
    faulthandler.dump_traceback_later(seconds, exit=True, file=STDERR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def end_with_parent(parent: int | None = None) -> None:
    """Let this process be killed when the thread that has started it ends.

    That reaches it also while it hangs, and holds for the program that it becomes. On Linux only;
    elsewhere a process of multiprocessing ends at its next message.

    Args:
        parent: the id of its parent; None: multiprocessing has started it, and knows.
    """
    if parent is None and (started_by := multiprocessing.parent_process()):
        parent = started_by.pid
    if sys.platform == "linux" and parent is not None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended before
            os._exit(1)


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Let SIGINT and SIGTERM wait for the end of the block, also in processes started inside."""
    received: list[int] = []
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        # Another thread may take a signal that this one has blocked.
        for number in SIGNALS:
            handlers[number] = signal.signal(number, lambda n, frame: received.append(n))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for taken, handler in handlers.items():
            signal.signal(taken, handler or signal.SIG_DFL)
        for late in received:
            signal.raise_signal(late)


def direct_loopback(*others: str) -> dict[str, str]:
    """The variables by which a process reaches this machine without a proxy.

    What they name in this process stays. Some programs read the one and some the other, and gRPC
    the third in place of both.

    Args:
        others: further addresses of this machine.
    """
    own = {name: os.environ.get(name) for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy")}
    either = own["no_proxy"] or own["NO_PROXY"] or ""
    found = {}
    for name, value in own.items():
        if name == "no_grpc_proxy" and value is None:
            continue
        hosts = [host for each in (value or either).split(",") if (host := each.strip())]
        if hosts != ["*"]:  # which many programs understand only where it stands alone
            hosts += [host for host in (*LOOPBACK, *others) if host not in hosts]
        found[name] = ",".join(hosts)
    return found


def thread_names() -> Iterator[str]:
    """The names of this process's threads, those of libraries included, on Linux."""
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # the thread has ended
            yield path.read_text().strip()


def choose_device(name: str) -> torch.device:
    """Return the device for auto, cpu or cuda.

    Raises:
        ConfigError: cuda was requested, but there is no CUDA device.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    elif name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device=cuda, but torch finds no CUDA device here; use device=cpu or device=auto"
        )
    return torch.device(name)
