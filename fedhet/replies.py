"""What comes back in a step: replies are checked and counted before anything is aggregated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from fedhet import messages, trees
from fedhet.errors import RunFailed
from fedhet.messages import Failure, Reply, Update
from fedhet.phases import Entry
from fedhet.trees import Tree


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
    bytes: dict[str, dict[str, int]] = field(default_factory=lambda: {"up": {}, "down": {}})
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    _reports: dict[str, int] = field(default_factory=dict)  # metric -> clients that reported it

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


def accepted(
    step: Step, replies: Iterable[Reply], check: Callable[[Update], None], on_failure: str
) -> Iterator[Update]:
    """The updates that pass every check, completed by the server's part.

    Every other reply is a failure of its client. With `on_failure` "skip" it is left out.

    Raises:
        RunFailed: a client failed and `on_failure` is "stop".
    """
    for reply in replies:
        if isinstance(reply, Update):
            slot = step.entry.phase.slot
            step.count("up", messages.payload(slot, reply.weights, reply.extras))
            try:
                _complete(step, reply)
                check(reply)
            except ValueError as error:
                reply = Failure(reply.pid, step.entry.name, step.step, str(error))
        if isinstance(reply, Failure):
            step.failures.append(reply)
            if on_failure == "stop":
                raise RunFailed(str(reply))
            continue
        step.measure(reply.metrics)
        yield reply


def _complete(step: Step, update: Update) -> None:
    """Check what every update has against what was sent, and form its `change` and `buffers`."""
    n = update.num_examples
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"num_examples is {n!r}; a whole number of at least 1 is expected")
    metrics = update.metrics
    if not isinstance(metrics, dict) or not all(
        isinstance(v, int | float) for v in metrics.values()
    ):
        raise ValueError(f"metrics are {metrics!r}; numbers by name are expected")
    update.extras = {
        name: messages.on_device(value, step.device) for name, value in update.extras.items()
    }
    if not update.weights:
        if step.sent and step.entry.phase.uploads:
            raise ValueError("the reply carries no weights")
        return
    if not step.entry.phase.slot:
        raise ValueError("the reply carries weights in a phase that has none")
    update.weights = {name: t.to(step.device) for name, t in update.weights.items()}
    messages.check_tree("weights", update.weights, step.sent)
    update.change = trees.Difference(trees.pick(update.weights, step.old), step.old)
    update.buffers = {name: t for name, t in update.weights.items() if name not in step.old}


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

    Floating-point buffers become the mean under the updates' final weights, integer ones (batch
    counters) the maximum.
    """

    def __init__(self, updates: Iterable[Update]) -> None:
        self._updates = iter(updates)
        self._mean = trees.Sum()
        self._most: Tree = {}

    def __iter__(self) -> Iterator[Update]:
        for update in self._updates:
            floating = {n: t for n, t in update.buffers.items() if t.is_floating_point()}
            if floating:
                self._mean.add(floating, update.weight)
            for name in update.buffers.keys() - floating.keys():
                t = update.buffers[name]
                self._most[name] = torch.maximum(self._most.get(name, t), t)
            yield update

    def values(self) -> Tree:
        """The combined buffers; complete once every update has been read."""
        means = self._mean.mean() if self._mean.tree else {}
        return {**means, **self._most}
