"""How many replies a step needs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import chain, islice
from typing import ClassVar

from fedhet.errors import RunFailed
from fedhet.messages import Update
from fedhet.replies import Step
from fedhet.setting import Setting

log = logging.getLogger("fedhet")


class Quorum:
    """Lets a step change something only if enough updates were accepted.

    Args:
        setting: `replies.least`, `replies.bad_steps` and `merge` count here.

    Attributes:
        in_row: the number of steps in a row with too few updates.
    """

    memory: ClassVar[tuple[str, ...]] = ("in_row",)

    def __init__(self, setting: Setting) -> None:
        self._limits = setting.replies
        self._merge = setting.merge
        self.in_row = 0

    def __call__(self, step: Step, admitted: Iterator[Update]) -> Iterator[Update] | None:
        """The updates of the step, or None if they are too few.

        Raises:
            RunFailed: too many steps in a row had too few updates, or the phase is not one of
                training and cannot be continued without them.
        """
        phase = step.entry.phase
        compared = self._merge.needs(step.sent, step.old) if phase.compared else 1
        least = max(self._limits.least, compared)
        needed = list(islice(admitted, least))
        # What the merge has refused was compared with the others all the same.
        outliers = sum(failure.reason == "outlier" for failure in step.failures)
        if len(needed) >= self._limits.least and len(needed) + outliers >= compared:
            self.in_row = 0
            return chain(needed, admitted)
        self.in_row += 1
        causes = "; ".join(map(str, step.failures)) or f"{len(step.cohort)} clients take part"
        reason = "replies.least" if self._limits.least >= compared else f"merge={self._merge.name}"
        if self.in_row > self._limits.bad_steps or not phase.trains:
            few = f"{len(needed)} of at least {least} replies accepted ({reason}): "
            raise RunFailed(f"{few if least > 1 else ''}{causes}")
        log.warning(
            "round %d changes nothing: %d replies accepted, %d needed (%s): %s",
            step.round,
            len(needed),
            least,
            reason,
            causes,
        )
        return None
