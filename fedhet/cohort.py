"""Who takes part in a step, as a function of (seed, phase, step): the same for every method and in
every engine."""

from __future__ import annotations

from collections.abc import Sequence

from fedhet import streams


def size(cohort: int | float | None, fraction: float, available: int) -> int:
    """How many of `available` clients: None = max(1, round(fraction n)), a float = that share, an
    int = a count (capped)."""
    if isinstance(cohort, int):
        return min(cohort, available)
    return max(1, round((fraction if cohort is None else cohort) * available))


def sample(
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
        : size(cohort, fraction, len(eligible))
    ]
    return sorted((eligible[i] for i in drawn), key=lambda pid: (-sizes[pid], pid))
