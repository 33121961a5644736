"""The state of a run, its timetable of phases, the step in progress, and its cohort."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fedhet.core import streams
from fedhet.core.kernel import Expected, Method, Phase, Plugin, State, Step
from fedhet.core.messages import Broadcast, Failure, LocalSettings, Recorded
from fedhet.core.trees import Tree

ByClient = dict[int, int]  # a number for each client; a step makes a new dict, and changes none


@dataclass(frozen=True, eq=False)
class RunState:
    """The state of a run after a step.

    A checkpoint stores this value. To undo a step, the server restores the value from before the
    step.

    Attributes:
        weights: the tensors of each slot, by slot; the slot "model" has all tensors of the model.
        states: the states by owner. The owners are "method", "plugin.<name>", "server_opt",
            "quorum" and "outliers".
        versions: the last round in which the server accepted a client's state, by client.
        state_bytes: the size of this state, by client.
        pinned: the `versions` at the best evaluation of each view, by view.
        lengths: the number of steps of each phase; for a phase that ended early, the steps taken.
        round: the number of the last step, from 1; 0 before the first.
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
    """One entry of the timetable: a phase and its length.

    Attributes:
        owner: the name of the plug-in that declared the phase; "" for the method.
        phase: the phase.
        rounds: the number of its steps; if it ended early, the number of steps taken.
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
    """A planned step, and the counts and failures in it so far.

    Attributes:
        messages: the messages to its clients.
        components: the method and the plug-ins that have extras in its messages.
        plugins: the plug-ins that take part in its training; none if the phase does not train.
        index: the position of `entry` in the timetable.
        entry: the entry of the timetable, as it was when the step began.
        round: the number of the step in the run, from 1.
        step: the number of the step in the phase, from 1.
        cohort: the clients that take part, in the order of their messages.
        sent: the weights of the slot that clients receive; empty without a slot.
        old: the part of `sent` that merges may change: trained and shared.
        local: the settings of local training in this step.
        seen: the step as each owner's functions see it, by owner.
        expected: the extras that each owner expects in a reply, by owner.
        device: the device of the aggregation.
        survive: called with a failure; ends the run unless it can continue without the client.
        failures: the clients that failed.
        accepted: the number of updates that were merged.
        bytes: for "up" and for "down", the bytes by kind.
        metrics: the mean of each metric over the clients that reported it, by name.
        seconds: the sum over the clients, by name.
        recorded: the recorded values, by component: numbers go to rounds.jsonl, tensors to arrays/.
        shapes: the shape of each extra in the first reply, for extras that may have any size.
        norms: the norms of what a reply changes, by client and then by kind.
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
    _senders: dict[str, int] = field(default_factory=dict)  # the number of senders of each metric

    @property
    def owner(self) -> Method | Plugin:
        """The method or the plug-in that declared the phase."""
        return next((c for c in self.components if c.name == self.entry.owner), self.components[0])

    def failure(self, pid: int, cause: str, reason: str) -> Failure:
        """Return a failure of the client in this step."""
        return Failure(pid, self.entry.name, self.step, cause, reason)

    def note(self, component: str, recorded: Mapping[str, Any]) -> None:
        """Add values that a component records in the step."""
        if recorded:
            self.recorded[component] = {**self.recorded.get(component, {}), **recorded}

    def record(self, failed: Failure) -> None:
        """Record the failure, and end the run if its settings demand it.

        Raises:
            RunFailed: `on_failure` is "stop", and the failure is no lost state that
                `on_lost_state` forgives.
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
        """Add the bytes of one message, by kind, to the bytes of `way`, which is "up" or "down"."""
        for kind, n in sizes.items():
            self.bytes[way][kind] = self.bytes[way].get(kind, 0) + n


def locate(timetable: Sequence[TimetableEntry], server_round: int) -> tuple[int, int] | None:
    """Return (index of the entry, step inside it) of a round; both steps and rounds count from 1.

    Return None for a round after the end of the timetable.
    """
    for index, entry in enumerate(timetable):
        if server_round <= entry.rounds:
            return index, server_round
        server_round -= entry.rounds
    return None


def cohort_size(cohort: int | float | None, fraction: float, available: int) -> int:
    """Return how many of the `available` clients take part.

    Args:
        cohort: an int is the number of clients, at most `available`; a float is their share; None
            uses `fraction`. A share means max(1, round(share * available)) clients.
        fraction: the share if `cohort` is None.
        available: the number of clients that can take part.
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
    """Draw the clients of a step, uniformly without replacement among the clients with data.

    The draw is a function of (seed, phase, step), the same for every method and in every engine.
    The clients are ordered by size, largest first, then by pid. Every engine sends messages and
    sums updates in this order.
    """
    eligible = [pid for pid, n in enumerate(sizes) if n]
    order = streams.generator(seed, "cohort", phase, step).permutation(len(eligible))
    drawn = [eligible[i] for i in order[: cohort_size(cohort, fraction, len(eligible))]]
    return sorted(drawn, key=lambda pid: (-sizes[pid], pid))
