"""What is counted in a step, and what is done to all of its updates around the merge."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from fedhet.core import trees
from fedhet.core.errors import RunFailed
from fedhet.core.merging import Average, floating_buffers
from fedhet.core.messages import Failure, Update
from fedhet.core.phases import Entry
from fedhet.core.plugin import Plugin
from fedhet.core.server_opt import ServerOptimizer
from fedhet.core.trees import Tree

if TYPE_CHECKING:
    from fedhet.core.setting import Setting


@dataclass
class Step:
    """The step in progress, and what has been counted in it so far.

    Attributes:
        index: the position of `entry` in the timetable.
        entry: the line of the timetable, as it was when the step began.
        round: its number over the whole run, from 1.
        step: its number inside the phase, from 1.
        cohort: the clients that take part, in the order of their messages.
        sent: the slot's weights as they travel; empty without a slot.
        old: the part of `sent` that merges may change: trained and shared.
        device: where the aggregation takes place.
        failures: the clients that did not deliver.
        accepted: the number of updates that were merged.
        bytes: "up" and "down" -> bytes by kind.
        metrics: the means over the clients that reported each.
        seconds: the sums over the clients.
    """

    index: int
    entry: Entry
    round: int
    step: int
    cohort: list[int]
    sent: Tree
    old: Tree
    device: torch.device
    failures: list[Failure] = field(default_factory=list)
    accepted: int = 0
    bytes: dict[str, dict[str, int]] = field(default_factory=lambda: {"up": {}, "down": {}})
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    _reports: dict[str, int] = field(default_factory=dict)  # metric -> clients that reported it

    def failure(self, pid: int, cause: str, reason: str) -> Failure:
        """A failure of the client in this step."""
        return Failure(pid, self.entry.name, self.step, cause, reason)

    def fail(self, pid: int, cause: str, reason: str, setting: Setting) -> None:
        """Record a failure of the client in this step.

        Raises:
            RunFailed: the run does not go on without the client.
        """
        self.record(self.failure(pid, cause, reason), setting)

    def record(self, failed: Failure, setting: Setting) -> None:
        """Note the failure, which may end the run (`on_failure`, `on_lost_state`).

        Raises:
            RunFailed: it does.
        """
        self.failures.append(failed)
        if setting.ends_run(failed):
            raise RunFailed(str(failed))

    def measure(self, metrics: dict[str, float]) -> None:
        """Add one client's metrics to the means and sums."""
        for name, value in metrics.items():
            if name.startswith("seconds."):
                self.seconds[name] = self.seconds.get(name, 0.0) + value
                continue
            n = self._reports[name] = self._reports.get(name, 0) + 1
            mean = self.metrics.get(name, 0.0)
            self.metrics[name] = mean + (value - mean) / n

    def count(self, way: str, sizes: dict[str, int]) -> None:
        """Add the bytes of one message, by kind, to those that went `way` ("up" or "down")."""
        for kind, n in sizes.items():
            self.bytes[way][kind] = self.bytes[way].get(kind, 0) + n


def normalised(updates: list[Update]) -> list[Update]:
    """The updates, with their weights scaled to sum to 1 over those that were received.

    Raises:
        RunFailed: a weight is negative, or their sum is not positive and finite.
    """
    weights = [update.weight for update in updates]
    total = sum(weights)
    if not 0 < total < float("inf") or any(weight < 0 for weight in weights):
        raise RunFailed(
            f"the aggregation weights {weights} must be >= 0 with a positive, finite sum"
        )
    for update in updates:
        update.weight /= total
    return updates


class BufferAverage:
    """Passes updates on to a merge, and combines their buffers, which merges never see.

    Floating-point buffers become the average of the run's `merge`, under the updates' final
    weights; integer ones (batch counters) the maximum.

    Args:
        updates: the updates.
        average: an average of the run's `merge`.
    """

    def __init__(self, updates: Iterable[Update], average: Average) -> None:
        self._updates = iter(updates)
        self._average = average
        self._any = False
        self._most: Tree = {}

    def __iter__(self) -> Iterator[Update]:
        for update in self._updates:
            if floating := floating_buffers(update):
                self._average.add(floating, update.weight)
                self._any = True
            for name in update.buffers.keys() - floating.keys():
                t = update.buffers[name]
                self._most[name] = torch.maximum(self._most.get(name, t), t)
            yield update

    def values(self) -> Tree:
        """The combined buffers; complete once every update has been read."""
        means = self._average.mean() if self._any else {}
        return {**means, **self._most}


def finished(
    step: Step,
    new: Tree,
    buffers: Tree,
    plugins: Sequence[Plugin],
    optimizer: ServerOptimizer | None,
) -> Tree:
    """What plug-ins and the server optimiser make of the merged weights, with the buffers.

    Raises:
        RunFailed: a tensor is not finite.
    """
    for plugin in reversed(plugins):
        new = plugin.merged(new, step.old)
    if optimizer and step.entry.phase.trains:
        new = optimizer.step(step.old, new)
    values = {**new, **buffers}
    if bad := trees.first_nonfinite(values):
        raise RunFailed(
            f"round {step.round}: the aggregated tensor {bad!r} holds NaN or infinite values"
        )
    return values
