"""What every strategy is built with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedhet.core.merging import Mean
from fedhet.core.messages import LOST, Failure, LocalSettings
from fedhet.core.phases import Phase
from fedhet.core.plugin import Plugin
from fedhet.core.server_opt import ServerOptimizer
from fedhet.core.workspace import Site


@dataclass(frozen=True)
class ReplyLimits:
    """Which replies are accepted, how long they are awaited, and how many must come.

    Attributes:
        deadline: seconds that a client may take for one message; None for no limit.
        grace: seconds that the server waits beyond the deadline, or after `enough`.
        enough: the share of a step's clients after whose replies the server waits no longer than
            `grace` for the others, where Flower carries the messages; None for all, or, with
            `oversample`, for as many as without it.
        oversample: so many more clients take part in a training round, as a share of the cohort.
        least: a step with fewer accepted replies changes nothing.
        bad_steps: the run fails after more than so many such steps in a row.
        max_lost: a run that loses a larger share of its replies is `degraded`.
        join: seconds to wait for nodes at the start.
        min_nodes: after `join` seconds, the run begins if so many nodes have joined; None: all.
        max_jump: a reply whose weights have changed by more than so many times the median of the
            last step is refused; None: any change is accepted.
        max_bytes: bytes of a reply from another process beyond twice those of its message.
    """

    deadline: float | None = None
    grace: float = 10.0
    enough: float | None = None
    oversample: float = 0.0
    least: int = 1
    bad_steps: int = 0
    max_lost: float = 0.1
    join: float = 600.0
    min_nodes: int | None = None
    max_jump: float | None = 1000.0
    max_bytes: int = 2**28

    def enough_of(self, clients: int) -> int | None:
        """How many replies of so many clients are enough; None if all are awaited."""
        if self.enough is None and not self.oversample:
            return None
        share = 1 / (1 + self.oversample) if self.enough is None else self.enough
        return max(1, round(clients * share))

    @classmethod
    def from_config(cls, settings: Mapping[str, Any]) -> ReplyLimits:
        """The limits as the configuration's `replies` states them."""
        limits = {name: value for name, value in settings.items() if name != "max_mb"}
        return cls(**limits, max_bytes=int(settings["max_mb"] * 2**20))


@dataclass
class Setting:
    """What every strategy is built with, so that a method's constructor names only its own options.

    Attributes:
        site: task, model and device.
        local: how clients train; `lr` is the rate of the first round.
        rounds: the number of training rounds.
        fraction: the share of the clients that take part in each round.
        lr_decay: multiplies the learning rate after each training round.
        schedule: "constant" or "cosine", on top of `lr_decay`.
        on_failure: what a failed client does to the run: "stop" it, or be left out ("skip").
        on_lost_state: "restart" lets a client whose state is lost begin again without one, in its
            next step; with "stop" that is a failure like others.
        replies: which replies are accepted, and how long they are awaited.
        eval_every: evaluate every so many rounds, and after the last.
        personal_mb: what the clients' personal models may take in the run folder, in MB; None: any
            size.
        last_k: summary.json has the mean score of the last so many evaluations.
        targets: summary.json has what it took to reach each of these scores.
        patience: stop after so many evaluations in a row without a better validation; None: never.
        min_delta: by how much a validation must be better to count.
        deliver: in the end, let every client keep the final models at its site.
        plugins: the plug-ins, in their order.
        server_opt: the server optimiser, or None.
        merge: how updates become one: their mean, or a merge that resists attackers.
    """

    site: Site
    local: LocalSettings
    rounds: int = 1
    fraction: float = 1.0
    lr_decay: float = 1.0
    schedule: str = "constant"
    on_failure: str = "stop"
    on_lost_state: str = "stop"
    replies: ReplyLimits = ReplyLimits()
    eval_every: int = 1
    personal_mb: float | None = 200.0
    last_k: int = 5
    targets: Sequence[float] = ()
    patience: int | None = None
    deliver: bool = False
    min_delta: float = 0.0
    plugins: Sequence[Plugin] = ()
    server_opt: ServerOptimizer | None = None
    merge: Mean = field(default_factory=Mean)

    def starts_afresh(self, reason: str) -> bool:
        """Whether this is a lost state, and the run lets its client begin again without one."""
        return reason == LOST and self.on_lost_state == "restart"

    def ends_run(self, failure: Failure) -> bool:
        """Whether the run does not go on without the client."""
        return self.on_failure == "stop" and not self.starts_afresh(failure.reason)

    def share(self, phase: Phase) -> float:
        """The share of the clients that take part in a step of the phase, unless it says itself."""
        return self.fraction * (1 + self.replies.oversample if phase.trains else 1)

    def local_in(self, phase: Phase, step: int) -> LocalSettings:
        """How clients train in a step of the phase: the schedule counts training rounds."""
        factor = self.rate(step) if phase.trains else 1.0
        return replace(self.local, lr=self.local.lr * factor)

    def rate(self, step: int) -> float:
        """The factor on local.lr in training round `step`, which counts from 1.

        The cosine falls from 1 in the first round towards 0 after the last.
        """
        factor = self.lr_decay ** (step - 1)
        if self.schedule == "cosine":
            factor *= 0.5 * (1 + math.cos(math.pi * (step - 1) / self.rounds))
        return factor
