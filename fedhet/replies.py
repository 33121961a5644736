"""What comes back in a step: replies are checked before any arithmetic, counted, and only then
aggregated."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from fedhet import messages, trees
from fedhet.errors import RunFailed
from fedhet.messages import Failure, Reply, Update
from fedhet.phases import Entry
from fedhet.trees import Tree

log = logging.getLogger("fedhet")


@dataclass
class Step:
    """The step in progress and what it has counted so far.

    `sent` is the slot as it travels, `old` the part of it that merges may change (shared,
    trainable). `bytes` by payload kind; `metrics` are means over the clients that told them,
    `seconds` sums."""

    entry: Entry
    round: int
    step: int
    cohort: list[int]
    sent: Tree | None
    old: Tree | None
    device: torch.device
    failures: list[Failure] = field(default_factory=list)
    bytes: dict[str, dict[str, int]] = field(default_factory=lambda: {"up": {}, "down": {}})
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    _told: dict[str, int] = field(default_factory=dict)  # how many clients have told each metric

    def measure(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            if name.startswith("seconds."):
                self.seconds[name] = self.seconds.get(name, 0.0) + value
            else:
                self._told[name] = self._told.get(name, 0) + 1
                self.metrics[name] = (
                    self.metrics.get(name, 0.0)
                    + (value - self.metrics.get(name, 0.0)) / self._told[name]
                )

    def count(self, way: str, sizes: dict[str, int]) -> None:
        for kind, n in sizes.items():
            self.bytes[way][kind] = self.bytes[way].get(kind, 0) + n


def accepted(
    step: Step, replies: Iterable[Reply], check: Callable[[Update], None], on_failure: str
) -> Iterator[Update]:
    """The updates that pass every check, with their delta. The rest are failures: RunFailed, or
    left out if `on_failure` is "skip"."""
    for reply in replies:
        if isinstance(reply, Update):
            step.count("up", messages.payload(step.entry.phase.slot, reply.weights, reply.extras))
            try:
                _open(step, reply)
                check(reply)
            except ValueError as error:
                reply = Failure(reply.pid, step.entry.header, step.step, str(error))
        if isinstance(reply, Failure):
            log.warning("%s", reply)
            step.failures.append(reply)
            if on_failure == "stop":
                raise RunFailed(str(reply))
            continue
        step.measure(reply.metrics)
        yield reply


def _open(step: Step, update: Update) -> None:
    """Check the reply's own part against what was sent, and form delta and buffers."""
    n = update.num_examples
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"num_examples is {n!r}; a whole number of at least 1 is expected")
    if not isinstance(update.metrics, dict) or not all(
        isinstance(v, int | float) for v in update.metrics.values()
    ):
        raise ValueError(f"metrics are {update.metrics!r}; numbers by name are expected")
    update.extras = {
        name: messages.on_device(value, step.device) for name, value in update.extras.items()
    }
    if update.weights is None:
        if step.sent is not None and step.entry.phase.uploads:
            raise ValueError("the reply carries no weights")
        return
    if step.sent is None or step.old is None:
        raise ValueError("the reply carries weights in a phase that has none")
    update.weights = {name: t.to(step.device) for name, t in update.weights.items()}
    messages.check_tree("weights", update.weights, step.sent)
    old = step.old
    update.delta = trees.Difference(trees.pick(update.weights, old), old)
    update.buffers = {name: t for name, t in update.weights.items() if name not in old}


def normalised(updates: list[Update]) -> list[Update]:
    """The updates with their weights scaled to sum 1, over those that were received."""
    total = sum(u.weight for u in updates)
    if not 0 < total < float("inf") or any(u.weight < 0 for u in updates):
        raise RunFailed(
            f"the aggregation weights {[u.weight for u in updates]} must be >= 0 with a positive,"
            " finite sum"
        )
    for update in updates:
        update.weight /= total
    return updates


class Buffers:
    """Passes updates on to a merge and combines, under their final weights, the buffers that merges
    never see.

    Floating buffers: the weighted mean. Integer buffers (batch counters): the maximum.
    """

    def __init__(self, updates: Iterable[Update]) -> None:
        self._updates = iter(updates)
        self._mean = trees.Sum()
        self._most: dict[str, torch.Tensor] = {}

    def __iter__(self) -> Iterator[Update]:
        for update in self._updates:
            floating = {n: t for n, t in update.buffers.items() if t.is_floating_point()}
            if floating:
                self._mean.add(floating, update.weight)
            for name in update.buffers.keys() - floating.keys():
                self._most[name] = torch.maximum(
                    self._most.get(name, update.buffers[name]), update.buffers[name]
                )
            yield update

    def values(self) -> Tree:
        return {**(self._mean.mean() if self._mean.tree else {}), **self._most}
