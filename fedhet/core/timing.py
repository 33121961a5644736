"""The clock by which the parts of a run are timed."""

from __future__ import annotations

import time
from contextvars import ContextVar


class Share:
    """The seconds that one of several runs in this process has taken (fedhet/engines/fused).

    They are its own, and its share of what was done for several at once.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.resume()

    def resume(self) -> None:
        """The run goes on."""
        self._since = time.perf_counter()

    def pause(self) -> None:
        """Another one goes on."""
        self.seconds = self.now()

    def now(self) -> float:
        """The seconds so far, of a run that goes on."""
        return self.seconds + time.perf_counter() - self._since


SHARE: ContextVar[Share | None] = ContextVar("share", default=None)  # None: the run is alone


def now() -> float:
    """Seconds since some moment, of which differences count."""
    share = SHARE.get()
    return time.perf_counter() if share is None else share.now()
