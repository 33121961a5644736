"""What lasts from step to step on the server, as one value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedhet.core.kernel import State
from fedhet.core.trees import Tree

MOST_CHANGES = 4096  # below which a step copies them; a copy of a million clients takes .05 s


class ByClient(Mapping[int, int]):
    """A number for each of some clients. It never changes; `changed` and `without` make another.

    The other one shares what it has in common with this one, so that a step costs the same whether
    there are ten clients or a million.
    """

    def __init__(self, base: dict[int, int] | None = None) -> None:
        self._base = base or {}
        self._changes: dict[int, int | None] = {}  # None: not there

    def __getitem__(self, pid: int) -> int:
        value = self._changes[pid] if pid in self._changes else self._base[pid]
        if value is None:
            raise KeyError(pid)
        return value

    def __iter__(self) -> Iterator[int]:
        changes = self._changes
        yield from (pid for pid in self._base if pid not in changes)
        yield from (pid for pid, value in changes.items() if value is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self) if self._changes else len(self._base)

    def changed(self, values: Mapping[int, int | None]) -> ByClient:
        """The same numbers with these in their place; None takes a client out."""
        if not values:
            return self
        other = ByClient(self._base)
        other._changes = {**self._changes, **values}
        return other if len(other._changes) < MOST_CHANGES else ByClient(dict(other))

    def without(self, pids: Iterable[int]) -> ByClient:
        """The same numbers, but for those of these clients."""
        return self.changed(dict.fromkeys(pid for pid in pids if pid in self))


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
    versions: ByClient = field(default_factory=ByClient)
    state_bytes: ByClient = field(default_factory=ByClient)
    pinned: dict[str, ByClient] = field(default_factory=dict)
    lengths: tuple[int, ...] = ()
    round: int = 0

    def as_values(self) -> dict[str, Any]:
        """The run as dicts, lists, numbers and tensors."""
        return {
            "weights": self.weights,
            "states": self.states,
            "versions": dict(self.versions),
            "state_bytes": dict(self.state_bytes),
            "pinned": {view: dict(versions) for view, versions in self.pinned.items()},
            "lengths": list(self.lengths),
            "round": self.round,
        }

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> RunState:
        """The inverse of `as_values`."""
        return cls(
            values["weights"],
            values["states"],
            ByClient(values["versions"]),
            ByClient(values["state_bytes"]),
            {view: ByClient(versions) for view, versions in values["pinned"].items()},
            tuple(values["lengths"]),
            values["round"],
        )
