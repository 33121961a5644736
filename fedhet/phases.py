"""The timetable of a run: which phase a step belongs to, who takes part in it, and when it ends early."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from fedhet import streams

if TYPE_CHECKING:
    from fedhet.messages import Update
    from fedhet.trees import Tree

Merge = Callable[["Iterator[Update]", "Tree | None"], "Tree | None"]


@dataclass(frozen=True)
class Phase:
    """One kind of step. It is served, on both sides, by the object that declared it.

    Args: name: the client method that serves it; on the wire "<plug-in>.<name>", or just the name
        for the method's own. rounds: at most so many steps. merge: (updates, old value of the slot)
        -> its new value, or None to keep it. slot: which named weights travel; None for none.
        cohort: None = the run's fraction, 1.0 = everyone, 20 = a count. trains: it trains the
        model, so the hooks of all plug-ins run in it. evaluate: the model is evaluated after its
        steps. until: asked after each merge; true ends the phase early. after: server work once the
        phase is over. uploads: the replies carry the slot's weights; False where it only travels
        down.
    """

    name: str
    rounds: int
    merge: Merge
    slot: str | None = "model"
    cohort: int | float | None = None
    trains: bool = False
    evaluate: bool = False
    until: Callable[[], bool] | None = None
    after: Callable[[], None] | None = None
    uploads: bool = True


@dataclass(frozen=True)
class Entry:
    """One line of the timetable: `piece` is the plug-in's name, or "" for the method."""

    piece: str
    phase: Phase
    rounds: int

    @property
    def header(self) -> str:
        return f"{self.piece}.{self.phase.name}" if self.piece else self.phase.name


@dataclass
class EarlyStopping:
    """Called with a loss after each round or epoch; true once `patience` in a row have not beaten
    the best by `tolerance`."""

    patience: int
    tolerance: float = 0.0
    best: float = inf
    stale: int = 0

    def __call__(self, loss: float) -> bool:
        better = loss < self.best - self.tolerance
        self.best, self.stale = (loss, 0) if better else (self.best, self.stale + 1)
        return self.stale >= self.patience


def locate(timetable: Sequence[Entry], server_round: int) -> tuple[int, int] | None:
    """(index of the entry, 1-based step inside it) of the 1-based `server_round`; None past the
    end."""
    for index, entry in enumerate(timetable):
        if server_round <= entry.rounds:
            return index, server_round
        server_round -= entry.rounds
    return None


def cohort_size(cohort: int | float | None, fraction: float, available: int) -> int:
    """How many of `available` clients: None = max(1, round(fraction n)), a float = that share, an
    int = a count (capped)."""
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
    """Partition ids, drawn uniformly without replacement among clients with data.

    Their order, largest first and ties by pid, is that of dispatch and of summation in every
    engine."""
    eligible = [pid for pid, n in enumerate(sizes) if n]
    drawn = streams.generator(seed, "cohort", phase, step).permutation(len(eligible))[
        : cohort_size(cohort, fraction, len(eligible))
    ]
    return sorted((eligible[i] for i in drawn), key=lambda pid: (-sizes[pid], pid))
