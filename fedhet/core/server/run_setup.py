"""The settings and objects from which every strategy is built."""

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
    """The settings and objects from which every strategy is built.

    Because they are here, the constructor of a method has only the method's own options.

    Attributes:
        workspace: task, model, device and the settings of the evaluation.
        local: how clients train; `lr` is the rate of the first round.
        plugins: the plug-ins, in their order.
        server_opt: the server optimiser, or None.
        merge: how to combine updates: by their mean, or by a merge that resists attackers.
    """

    workspace: Workspace
    local: LocalSettings
    plugins: Sequence[Plugin] = ()
    server_opt: ServerOptimizer | None = None
    merge: Mean = field(default_factory=Mean)

    def starts_afresh(self, reason: str) -> bool:
        """Whether the failure is a lost state, and the run lets the client restart without one."""
        return reason == LOST and self.on_lost_state == "restart"

    def survive(self, failure: Failure) -> None:
        """End the run, unless it can continue without the client.

        Raises:
            RunFailed: `on_failure` is "stop", and the client may not restart without its state.
        """
        if self.on_failure == "stop" and not self.starts_afresh(failure.reason):
            raise RunFailed(f"{failure}; on_failure=skip continues without it")

    def share(self, phase: Phase) -> float:
        """Return the share of the clients in a step of the phase, if the phase has no `cohort`."""
        return self.fraction * (1 + self.replies.oversample if phase.trains else 1)

    def local_in(self, phase: Phase, step: int) -> LocalSettings:
        """Return the settings of local training in a step of the phase; `step` counts from 1.

        If the phase trains the model, the schedule lowers the learning rate. The factor of "cosine"
        falls from 1 in the first round towards 0 after the last.
        """
        if not phase.trains:
            return self.local
        factor = self.lr_decay ** (step - 1)
        if self.schedule == "cosine":
            factor *= 0.5 * (1 + math.cos(math.pi * (step - 1) / self.rounds))
        return replace(self.local, lr=self.local.lr * factor)
