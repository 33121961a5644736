"""Settings of this process: garbage collection, threads, signals, proxies and the device."""

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
# If a signal ends one process of a run, the run may receive the same signal within this time.
TOGETHER_SECONDS = 1.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")
PR_SET_PDEATHSIG = 1  # of Linux's prctl
STDERR = 2  # the file descriptor; Ray replaces sys.stderr


@contextmanager
def imports() -> Iterator[None]:
    """Import heavy packages faster, in a process that belongs to fedhet.

    Imported modules stay in memory, so it wastes time to search them for garbage. The block runs
    without garbage collection, which makes the import of torch a fifth faster. Later collections
    skip all objects that exist at the end of the block. The collection at the end of the process is
    skipped, too, because it takes a second with torch and Flower.
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
    # triton's bindings report every uncollected object as a leak, in fifty lines.
    if "triton" in sys.modules:
        gc.unfreeze()
    else:
        gc.freeze()


def pin_threads(threads: int) -> None:
    """Set the number of threads for arithmetic in this process.

    The number determines the last bits of every sum.
    """
    import torch
    from threadpoolctl import threadpool_limits

    torch.set_num_threads(threads)
    threadpool_limits(limits=threads)


@contextmanager
def pinned_threads(threads: int) -> Iterator[None]:
    """Set the number of threads inside the block, and restore the previous number after it."""
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
    """End this process if the block takes longer, and write a traceback to stderr.

    It works even if the hanging code keeps Python's threads from running. Use it only in a process
    that serves one client.
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
    """Let the kernel kill this process when the thread that started it ends.

    This works even if the process hangs, and also after an exec. It needs Linux; elsewhere, a
    process of multiprocessing ends at its next message.

    Args:
        parent: the id of the parent process; None: ask multiprocessing, which started this process.
    """
    if parent is None and (started_by := multiprocessing.parent_process()):
        parent = started_by.pid
    if sys.platform == "linux" and parent is not None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent has ended already
            os._exit(1)


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Delay SIGINT and SIGTERM until the end of the block, also in processes started inside it."""
    received: list[int] = []
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        # Another thread may receive a signal that this one blocks.
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
    """Return the variables with which a process connects to this machine without a proxy.

    The addresses that the variables of this process name are kept. Some programs read `no_proxy`,
    some `NO_PROXY`, and gRPC reads `no_grpc_proxy` instead of both if it is set.

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
        if hosts != ["*"]:  # many programs understand "*" only if it stands alone
            hosts += [host for host in (*LOOPBACK, *others) if host not in hosts]
        found[name] = ",".join(hosts)
    return found


def thread_names() -> Iterator[str]:
    """Yield the names of this process's threads, including threads of libraries, on Linux."""
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
            "device=cuda: torch finds no CUDA device on this machine; use device=cpu or device=auto"
        )
    return torch.device(name)
