"""The timetable of a run: its phases in order, who takes part in a step, and when a phase ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from math import inf
from typing import TYPE_CHECKING, ClassVar

from fedhet.core import streams

if TYPE_CHECKING:
    from fedhet.core.messages import Update
    from fedhet.core.strategy import FedStrategy
    from fedhet.core.trees import Tree

Merge = Callable[["Iterator[Update]", "Tree"], "Tree"]


@dataclass(frozen=True)
class Phase:
    """One kind of step. The object that declares a phase serves it, on the server and on clients.

    Attributes:
        name: the client's method that serves it. Messages carry "<plug-in>.<name>", or the plain
            name where the method itself is the owner.
        rounds: the largest number of steps.
        merge: (updates, old values of the slot's trained tensors) -> the new values, or {} to keep
            the old ones. Without a slot, `old` is empty.
        check: raises ValueError where an update's extras are bad; the update then counts as that
            client's failure.
        slot: whose weights travel; "" for none.
        cohort: who takes part: None for the run's `fraction`, 1.0 for everyone, 20 for a count.
        trains: whether it trains the model, so that the hooks of all plug-ins run.
        evaluate: whether the model is evaluated after its steps.
        until: called after each merge; the phase ends early when it returns true.
        after: called on the server when the phase has ended.
        uploads: whether replies carry the slot's weights; False where they only travel down.
    """

    name: str
    rounds: int
    merge: Merge
    _: KW_ONLY
    check: Callable[[Update], None] | None = None
    slot: str = "model"
    cohort: int | float | None = None
    trains: bool = False
    evaluate: bool = False
    until: Callable[[], bool] | None = None
    after: Callable[[], None] | None = None
    uploads: bool = True

    @property
    def compared(self) -> bool:
        """Whether the run's `merge` compares the replies: they change a slot."""
        return bool(self.slot and (self.uploads or self.trains))


@dataclass(frozen=True)
class Entry:
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
class EarlyStopping:
    """Tells when a loss has stopped falling.

    Call it with the loss after each round or epoch. It returns true once `patience` calls in a row
    have not been below the best loss by more than `tolerance`.
    """

    patience: int
    tolerance: float = 0.0
    memory: ClassVar[tuple[str, ...]] = ("best", "stale")
    best: float = inf
    stale: int = 0

    def __call__(self, loss: float) -> bool:
        if loss < self.best - self.tolerance:
            self.best = loss
            self.stale = 0
        else:
            self.stale += 1
        return self.stale >= self.patience


def timetable(method: FedStrategy) -> list[Entry]:
    """The phases of the plug-ins, in their order, and then those of the method."""
    phases = [(plugin.name, phase) for plugin in method.plugins for phase in plugin.phases()]
    phases += [("", phase) for phase in method.phases()]
    return [Entry(owner, phase, phase.rounds) for owner, phase in phases]


def locate(timetable: Sequence[Entry], server_round: int) -> tuple[int, int] | None:
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
