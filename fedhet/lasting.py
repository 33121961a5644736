"""Heavy imports in a process that is ours: what they make stays, and Python's collector would
search it for garbage again and again."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


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
