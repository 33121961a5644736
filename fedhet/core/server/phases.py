"""What lasts of a run, its phases in order, the step in progress, and who takes part in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fedhet.core import streams
from fedhet.core.kernel import Expected, Method, Phase, Plugin, State, Step
from fedhet.core.messages import Broadcast, Failure, LocalSettings, Recorded
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


@dataclass(frozen=True)
class TimetableEntry:
    """One line of the timetable.

    Attributes:
        owner: the name of the plug-in that declared the phase; "" for the method.
        phase: the phase.
        rounds: how many steps it has; after it has ended, how many it had.
    """

    owner: str
    phase: Phase
    rounds: int

    @property
    def name(self) -> str:
        """The name of the phase in messages and records, such as "fedlex.explore" or "train"."""
        return f"{self.owner}.{self.phase.name}" if self.owner else self.phase.name


@dataclass
class OpenStep:
    """A step that was begun, and what has been counted in it so far.

    Attributes:
        messages: what its clients are sent.
        pieces: the method and the plug-ins whose extras travel in it.
        plugins: those plug-ins that take part in its training; none in a step of another phase.
        index: the position of `entry` in the timetable.
        entry: the line of the timetable, as it was when the step began.
        round: its number over the whole run, from 1.
        step: its number inside the phase, from 1.
        cohort: the clients that take part, in the order of their messages.
        sent: the slot's weights as they travel; empty without a slot.
        old: the part of `sent` that merges may change: trained and shared.
        local: how clients train in it.
        seen: owner -> the step as its functions see it.
        expected: owner -> what it expects of a reply.
        device: where the aggregation takes place.
        survive: ends the run, unless it goes on without a client that failed.
        failures: the clients that did not deliver.
        accepted: the number of updates that were merged.
        bytes: "up" and "down" -> bytes by kind.
        metrics: the means over the clients that reported each.
        seconds: the sums over the clients.
        recorded: piece -> what it has recorded: numbers go to rounds.jsonl, tensors to arrays/.
        shapes: extra -> that of the first reply, where the extra may be of any size.
        norms: client -> the norms of what its reply changes, by kind.
    """

    messages: list[Broadcast]
    components: Sequence[Method | Plugin]
    plugins: Sequence[Plugin]
    index: int
    entry: TimetableEntry
    round: int
    step: int
    cohort: list[int]
    sent: Tree
    old: Tree
    local: LocalSettings
    seen: dict[str, Step]
    expected: dict[str, Mapping[str, Expected]]
    device: torch.device
    survive: Callable[[Failure], None]
    failures: list[Failure] = field(default_factory=list)
    accepted: int = 0
    bytes: dict[str, dict[str, int]] = field(default_factory=lambda: {"up": {}, "down": {}})
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    recorded: dict[str, Recorded] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    norms: dict[int, dict[str, float]] = field(default_factory=dict)
    _senders: dict[str, int] = field(default_factory=dict)  # metric -> clients that sent it

    @property
    def owner(self) -> Method | Plugin:
        """Whose phase it is: that of the method, or of a plug-in."""
        named = (component for component in self.components if component.name == self.entry.owner)
        return next(named, self.components[0])

    def failure(self, pid: int, cause: str, reason: str) -> Failure:
        """A failure of the client in this step."""
        return Failure(pid, self.entry.name, self.step, cause, reason)

    def note(self, component: str, recorded: Mapping[str, Any]) -> None:
        """Add what a piece records of the step."""
        if recorded:
            self.recorded[component] = {**self.recorded.get(component, {}), **recorded}

    def record(self, failed: Failure) -> None:
        """Note the failure, which may end the run (`on_failure`, `on_lost_state`).

        Raises:
            RunFailed: it does.
        """
        self.failures.append(failed)
        self.survive(failed)

    def measure(self, metrics: dict[str, float]) -> None:
        """Add one client's metrics to the means and sums."""
        for name, value in metrics.items():
            if name.startswith("seconds."):
                self.seconds[name] = self.seconds.get(name, 0.0) + value
                continue
            n = self._senders[name] = self._senders.get(name, 0) + 1
            mean = self.metrics.get(name, 0.0)
            self.metrics[name] = mean + (value - mean) / n

    def count(self, way: str, sizes: dict[str, int]) -> None:
        """Add the bytes of one message, by kind, to those that went `way` ("up" or "down")."""
        for kind, n in sizes.items():
            self.bytes[way][kind] = self.bytes[way].get(kind, 0) + n


def locate(timetable: Sequence[TimetableEntry], server_round: int) -> tuple[int, int] | None:
    """(index of the entry, step inside it) of a round; both steps and rounds count from 1.

    None past the end of the timetable.
    """
    for index, entry in enumerate(timetable):
        if server_round <= entry.rounds:
            return index, server_round
        server_round -= entry.rounds
    return None


def cohort_size(cohort: int | float | None, fraction: float, available: int) -> int:
    """How many of the `available` clients take part.

    None means max(1, round(fraction * available)), a float means that share instead of `fraction`,
    and an int is a count, of which there are at most `available`.
    """
    if isinstance(cohort, int):
        return min(cohort, available)
    return max(1, round((fraction if cohort is None else cohort) * available))


def sample_cohort(
    sizes: Sequence[int],
    cohort: int | float | None,
    fraction: float,
    seed: int,
    phase: str,
    step: int,
) -> list[int]:
    """The clients of a step: drawn uniformly without replacement among those that have data.

    The draw is a function of (seed, phase, step), the same for every method and in every engine.
    The clients are ordered by size, largest first, then by pid. Messages are sent and updates are
    summed in this order in every engine.
    """
    eligible = [pid for pid, n in enumerate(sizes) if n]
    order = streams.generator(seed, "cohort", phase, step).permutation(len(eligible))
    drawn = [eligible[i] for i in order[: cohort_size(cohort, fraction, len(eligible))]]
    return sorted(drawn, key=lambda pid: (-sizes[pid], pid))
