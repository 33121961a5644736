"""Settings of the current process: garbage collection around imports, threads, and the device."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fedhet.errors import ConfigError

if TYPE_CHECKING:
    import torch


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


def _freeze_at_exit() -> None:
    # triton's bindings report every object that was not collected as a leak, in fifty lines.
    if "triton" not in sys.modules:
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
