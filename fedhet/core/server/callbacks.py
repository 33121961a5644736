"""The base class of callbacks: a run's record, its checkpoints, its privacy account and others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from fedhet.core.messages import Broadcast, Upload
    from fedhet.core.server.loop import Loop

Row = dict[str, Any]  # one line of rounds.jsonl


class Callback:
    """Base of callbacks. A run calls each of them at six moments; by default they do nothing.

    A run calls its callbacks in the order in which it lists them. An exception ends the run. If the
    run should survive a callback's error, the callback must catch it.

    Attributes:
        name: the name under which checkpoints store its memory.
        memory: the names of the attributes that checkpoints store.
        accounts: whether it accounts for what clients release; without such a callback, a run
            refuses noise.
    """

    name: ClassVar[str] = ""
    memory: ClassVar[tuple[str, ...]] = ()
    accounts: ClassVar[bool] = False

    def begun(self, loop: Loop) -> None:
        """Called before the first step, or before the first remaining step of a resumed run."""

    def planned(self, loop: Loop, plan: list[Broadcast]) -> None:
        """Called before messages are sent, also for evaluations. It may add extras to messages."""

    def accepted(self, loop: Loop, update: Upload) -> None:
        """Called with each accepted update, before the update takes effect.

        An accepted update has passed the checks and, in a step, was selected by `merge`.
        """

    def evaluated(self, loop: Loop, row: Row, updates: Sequence[Upload]) -> bool | None:
        """Called after the clients have evaluated the model; true ends the phase."""

    def step_ended(self, loop: Loop, row: Row) -> None:
        """Called when the step is over; if an evaluation was due, the row has its scores.

        If this evaluation failed, the run ends with this step, and `loop.row` is the row.
        """

    def ended(self, loop: Loop, status: str, error: BaseException | None) -> None:
        """Called at the end of the run.

        Args:
            loop: the run.
            status: "ok", "failed" or "interrupted". If a callback fails, the next ones get
                "failed".
            error: why the run failed or was interrupted; None if its status is "ok".
        """
