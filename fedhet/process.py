"""Heavy imports in a process that is ours: what they make stays, and Python's collector would
search it for garbage again and again."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fedhet.errors import ConfigError

if TYPE_CHECKING:
    import torch


@contextmanager
def imports() -> Iterator[None]:
    """Inside, nothing is collected, which takes a fifth off torch's import; what then is there is
    never searched.

    Nor is the rest at the process's end, where that takes torch and Flower a second.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(_end)


def _end() -> None:
    if (
        "triton" not in sys.modules
    ):  # its bindings tell what was not collected as leaks, in fifty lines
        gc.freeze()


def pin_threads(threads: int) -> None:
    """The number of threads that arithmetic uses, in this process; it decides the last bits of
    every sum."""
    import torch
    from threadpoolctl import threadpool_limits

    torch.set_num_threads(threads)
    threadpool_limits(limits=threads)


@contextmanager
def pinned_threads(threads: int) -> Iterator[None]:
    """The same for a while: a notebook gets its own threads back."""
    import torch
    from threadpoolctl import threadpool_limits

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with threadpool_limits(limits=threads):
            yield
    finally:
        torch.set_num_threads(before)


def choose_device(name: str) -> torch.device:
    """auto | cpu | cuda; ConfigError where cuda is asked for and missing."""
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device=cuda, but torch finds no CUDA device here; use device=cpu or device=auto"
        )
    return torch.device(
        "cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu"
    )
