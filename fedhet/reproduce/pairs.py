"""What runs measure, seed by seed, alone and against other runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from statistics import mean

from fedhet.experiment.axes import SEED
from fedhet.reproduce import measures
from fedhet.reproduce.runs import ReproducedRun
from fedhet.reproduce.verdict import Sample

Place = tuple[tuple[str, str], ...]  # axis and label, of some of the axes


def sample(runs: Sequence[ReproducedRun], measure: str) -> Sample:
    """What each run measures; runs without a value are left out."""
    values = (measures.value(measure, run) for run in runs)
    return Sample(tuple(value for value in values if math.isfinite(value)))


def differences(
    ours: Sequence[ReproducedRun],
    theirs: Sequence[ReproducedRun],
    measure: str,
    differing: Collection[str],
) -> list[float]:
    """One for each seed: the mean over the settings in which every seed has a difference.

    Another choice of settings would itself be a difference between the seeds.

    Args:
        ours: the runs from whose values the others' are subtracted.
        theirs: the others.
        measure: what is compared.
        differing: the axes on which a run and its partner differ.
    """

    def place(run: ReproducedRun, *without: str) -> Place:
        apart = {*differing, *without}
        return tuple((k, str(v)) for k, v in run.cell.axes.items() if k not in apart)

    partners = {place(run): run for run in theirs}
    by_seed: dict[str, dict[Place, float]] = {}
    for run in ours:
        if partner := partners.get(place(run)):
            difference = measures.value(measure, run) - measures.value(measure, partner)
            if math.isfinite(difference):
                found = by_seed.setdefault(str(run.cell.axes.get(SEED)), {})
                found[place(run, SEED)] = difference
    if not by_seed:
        return []
    every = set.intersection(*(set(found) for found in by_seed.values()))
    return [mean(found[p] for p in sorted(every)) for found in by_seed.values()] if every else []


def tuned(*groups: Sequence[ReproducedRun]) -> str:
    """The settings that trials have chosen for the runs, and which lie at the edge of their grid.

    Args:
        groups: the runs of a row; of a claim, those on its two sides.

    Returns:
        Such as `client.lr=0.03, at the edge`, or `client.lr=0.03 against client.lr=0.1`; empty if
        nothing was tuned.
    """
    sides = [" or ".join(dict.fromkeys(filter(None, map(_tuned, runs)))) for runs in groups]
    return " against ".join(side or "nothing" for side in sides) if any(sides) else ""


def _tuned(run: ReproducedRun) -> str:
    entries = run.results.source.experiment.get("tuned") or []
    places = {axis: str(label) for axis, label in run.cell.axes.items()}
    edges = {
        key
        for entry in entries
        if all(places.get(axis) == str(label) for axis, label in entry["axes"].items())
        for key in entry["at_the_edge"]
    }
    return "; ".join(
        f"{key}={value}{', at the edge' if key in edges else ''}"
        for key, value in run.cell.tuned.items()
    )
