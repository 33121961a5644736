"""What listens to a run: its record, its checkpoints, the account of its privacy, and others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from fedhet.core.messages import Broadcast, Upload
    from fedhet.core.server.loop import Loop

Row = dict[str, Any]  # one line of rounds.jsonl


class Callback:
    """Is called at six moments of a run; by default it does nothing.

    The callbacks of a run are called in the order in which the run lists them. An exception ends
    the run, so that a callback whose failure is not the run's catches it.

    Attributes:
        name: under which checkpoints keep what it remembers.
        memory: the names of the attributes that outlast a step, for checkpoints.
        accounts: whether it counts what clients release, without which noise is refused.
    """

    name: ClassVar[str] = ""
    memory: ClassVar[tuple[str, ...]] = ()
    accounts: ClassVar[bool] = False

    def begun(self, loop: Loop) -> None:
        """Called before the first step, or before the first one that is left."""

    def planned(self, loop: Loop, plan: list[Broadcast]) -> None:
        """Called before messages are sent, those of evaluations too; it may add extras to them."""

    def accepted(self, loop: Loop, update: Upload) -> None:
        """Called with each update that has passed the checks, before it takes effect."""

    def evaluated(self, loop: Loop, row: Row, updates: Sequence[Upload]) -> bool | None:
        """Called after the clients have evaluated the model; true ends the phase."""

    def step_ended(self, loop: Loop, row: Row) -> None:
        """Called when the step is over; an evaluation that was due is part of the row.

        Where that has failed, the run ends with this step, and `loop.row` is the row.
        """

    def ended(self, loop: Loop, status: str, error: BaseException | None) -> None:
        """Called in the end.

        Args:
            loop: the run.
            status: "ok", "failed" or "interrupted"; a callback that fails changes it for the next.
            error: why the run has not ended well.
        """
