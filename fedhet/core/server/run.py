"""What lasts from step to step on the server, as one value."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedhet.core.kernel import State
from fedhet.core.trees import Tree

ByClient = dict[int, int]  # client -> a number; steps replace it, and do not change it


@dataclass(frozen=True, eq=False)
class RunState:
    """What lasts. A checkpoint is this value, saved; an undone step leaves the value before it.

    Attributes:
        weights: slot -> its tensors; "model" has all of the model's.
        states: owner -> its state. The owners are "method", "plugin.<name>", "server_opt",
            "quorum" and "outliers".
        versions: client -> the round whose client state was accepted.
        state_bytes: client -> the size of that state.
        pinned: view -> `versions` at its best evaluation.
        lengths: of each phase the number of its steps; once it has ended, how many it had.
        round: the number of the last step that was taken, from 1; 0 before the first.
    """

    weights: dict[str, Tree]
    states: dict[str, State]
    versions: ByClient = field(default_factory=dict)
    state_bytes: ByClient = field(default_factory=dict)
    pinned: dict[str, ByClient] = field(default_factory=dict)
    lengths: tuple[int, ...] = ()
    round: int = 0
