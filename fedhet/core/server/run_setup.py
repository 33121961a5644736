"""What every strategy is built with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fedhet.core.errors import RunFailed
from fedhet.core.groups import Course, LocalSettings
from fedhet.core.kernel import Phase, Plugin
from fedhet.core.messages import LOST, Failure
from fedhet.core.server.merging import Mean
from fedhet.core.server.server_opt import ServerOptimizer
from fedhet.core.workspace import Workspace


@dataclass(frozen=True)
class RunSetup(Course):
    """What every strategy is built with, so that a method's constructor names only its own options.

    Attributes:
        workspace: task, model and device, and what is evaluated.
        local: how clients train; `lr` is the rate of the first round.
        plugins: the plug-ins, in their order.
        server_opt: the server optimiser, or None.
        merge: how updates become one: their mean, or a merge that resists attackers.
    """

    workspace: Workspace
    local: LocalSettings
    plugins: Sequence[Plugin] = ()
    server_opt: ServerOptimizer | None = None
    merge: Mean = field(default_factory=Mean)

    def starts_afresh(self, reason: str) -> bool:
        """Whether this is a lost state, and the run lets its client begin again without one."""
        return reason == LOST and self.on_lost_state == "restart"

    def survive(self, failure: Failure) -> None:
        """End the run, unless it goes on without the client.

        Raises:
            RunFailed: it does not.
        """
        if self.on_failure == "stop" and not self.starts_afresh(failure.reason):
            raise RunFailed(f"{failure}; on_failure=skip goes on without it")

    def share(self, phase: Phase) -> float:
        """The share of the clients that take part in a step of the phase, unless it says itself."""
        return self.fraction * (1 + self.replies.oversample if phase.trains else 1)

    def local_in(self, phase: Phase, step: int) -> LocalSettings:
        """How clients train in a step of the phase; `step` counts from 1.

        In the training the schedule lowers the rate: the cosine falls from 1 in the first round
        towards 0 after the last.
        """
        if not phase.trains:
            return self.local
        factor = self.lr_decay ** (step - 1)
        if self.schedule == "cosine":
            factor *= 0.5 * (1 + math.cos(math.pi * (step - 1) / self.rounds))
        return replace(self.local, lr=self.local.lr * factor)
