"""How many replies a step needs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import chain, islice
from typing import ClassVar

from fedhet.errors import RunFailed
from fedhet.messages import Update
from fedhet.replies import Step
from fedhet.setting import ReplyLimits

log = logging.getLogger("fedhet")


class Quorum:
    """Lets a step change something only if enough updates were accepted.

    Args:
        limits: `least` and `bad_steps` count here.

    Attributes:
        in_row: the number of steps in a row with too few updates.
    """

    memory: ClassVar[tuple[str, ...]] = ("in_row",)

    def __init__(self, limits: ReplyLimits) -> None:
        self._limits = limits
        self.in_row = 0

    def __call__(self, step: Step, admitted: Iterator[Update]) -> Iterator[Update] | None:
        """The updates of the step, or None if they are too few.

        Raises:
            RunFailed: too many steps in a row had too few updates, or the phase is not one of
                training and cannot be continued without them.
        """
        least = self._limits.least
        needed = list(islice(admitted, least))
        if len(needed) == least:
            self.in_row = 0
            return chain(needed, admitted)
        self.in_row += 1
        causes = "; ".join(map(str, step.failures)) or "no client replied"
        if self.in_row > self._limits.bad_steps or not step.entry.phase.trains:
            few = f"{len(needed)} of at least {least} replies accepted: " if least > 1 else ""
            raise RunFailed(f"{few}{causes}")
        log.warning(
            "round %d changes nothing: %d replies accepted, replies.least=%d: %s",
            step.round,
            len(needed),
            least,
            causes,
        )
        return None
