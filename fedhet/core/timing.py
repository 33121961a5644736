"""The clock that times the parts of a run."""

from __future__ import annotations

import time
from contextvars import ContextVar


class Share:
    """The seconds that one of several runs in this process has taken (fedhet/engines/fused).

    They consist of the run's own time, and its share of the work for several runs at once.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.resume()

    def resume(self) -> None:
        """Start counting: this run continues."""
        self._since = time.perf_counter()

    def pause(self) -> None:
        """Stop counting: another run continues."""
        self.seconds = self.now()

    def now(self) -> float:
        """Return the seconds so far, while the run is not paused."""
        return self.seconds + time.perf_counter() - self._since


SHARE: ContextVar[Share | None] = ContextVar("share", default=None)  # None: the run is alone


def now() -> float:
    """Return seconds since an arbitrary moment; only differences have a meaning."""
    share = SHARE.get()
    return time.perf_counter() if share is None else share.now()
