"""merge=mean, and what the other choices of the group change of it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import TYPE_CHECKING, ClassVar, Protocol

from fedhet import trees
from fedhet.plugin import Report
from fedhet.trees import AnyTree, Tree

if TYPE_CHECKING:
    from fedhet.messages import Update
    from fedhet.replies import Step
    from fedhet.setting import Setting


LEAST = 3  # the median of two is their mean, in which one of them counts as much as the other


class Average(Protocol):
    """What takes trees one by one, and then says their average."""

    def add(self, tree: AnyTree, weight: float) -> None:
        """Take one more tree."""

    def mean(self, *, reuse: bool = False) -> Tree:
        """The average in float64; with `reuse`, the object must not be used afterwards."""


class Mean:
    """The mean of the updates under their weights: every hook leaves the updates as they are.

    A step meets the hooks in this order: `admit` before the updates are counted against
    `replies.least`, `select` before any of them takes effect, and `average` in the merge.

    Attributes:
        name: its name in the configuration.
        weighted: whether the weights of the updates have an effect.
        averages: whether it replaces the mean, so that a method must take all its means with it.
        rescales: whether it changes the weights in replies, so that they must be all that a method
            takes from them.
        compares: whether it compares the weights in replies, so that there must be some.
        report: what the step in progress should record.
    """

    name: ClassVar[str] = "mean"
    weighted: ClassVar[bool] = True
    averages: ClassVar[bool] = False
    rescales: ClassVar[bool] = False
    compares: ClassVar[bool] = False

    def __init__(self) -> None:
        self.report: Report = {}

    @property
    def least(self) -> int:
        """How many updates it needs in a step that merges them, with those that it refuses."""
        return 1

    @property
    def least_with_buffers(self) -> int:
        """The same of a step whose updates carry buffers that are averaged."""
        return self.least

    def needs(self, sent: AnyTree, trained: Container[str]) -> int:
        """How many updates it needs in a step whose clients receive these weights.

        Args:
            sent: the weights.
            trained: the names of those that are no buffers.
        """
        buffers = any(sent[name].is_floating_point() for name in sent if name not in trained)
        return self.least_with_buffers if buffers else self.least

    def admit(self, step: Step, updates: Iterator[Update], setting: Setting) -> Iterator[Update]:
        """The updates that are accepted; it records each of the others as a failure."""
        return updates

    def select(self, step: Step, updates: Iterator[Update]) -> Iterator[Update]:
        """The updates that take effect. The others are no failures."""
        return updates

    def average(self) -> Average:
        """An average to which trees are added one by one."""
        return trees.Sum()

    def mean(self, pairs: Iterable[tuple[AnyTree, float]]) -> Tree:
        """The average of (tree, weight) pairs."""
        average = self.average()
        for tree, weight in pairs:
            average.add(tree, weight)
        return average.mean(reuse=True)


def floating_buffers(update: Update) -> Tree:
    """Those buffers of an update that are averaged."""
    return {name: t for name, t in update.buffers.items() if t.is_floating_point()}
