"""Compares the runs of a folder with the figures and claims of a paper."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from fedhet.core.errors import ConfigError
from fedhet.runs.config.experiment_file import SEED
from fedhet.runs.config.lines import by_key, value_of
from fedhet.study.report.compared import FEWEST_TUNING_SEEDS
from fedhet.study.report.results import Results, results
from fedhet.study.report.statistics import NOT_SHOWN
from papers import measures
from papers.paper import (
    LEVELS,
    NOTHING,
    Claim,
    Paper,
    as_text,
    find,
    refuse_open_axes,
)
from papers.runs import ReproducedRun, runs_of
from papers.verdict import (
    DIRECTION_ONLY,
    NOT_REPRODUCED,
    Sample,
    directions,
    level,
    verdict,
)

FIGURE, CLAIM = "figure", "claim"
Place = tuple[tuple[str, str], ...]  # axis and label, for some of the axes
Pairs = Mapping[tuple[str, Place], tuple[ReproducedRun, ReproducedRun]]  # by seed and place


@dataclass(frozen=True)
class Row:
    """A row of the comparison.

    Attributes:
        kind: FIGURE or CLAIM.
        setting: the axes without the method and the seed; for a claim, its text.
        method: the measured method; for a claim, the two compared sides.
        measure: the measure.
        ours: our values, one for each seed; for a claim, the differences.
        value: the paper's figure; None for a claim.
        spread: the paper's spread, or None.
        differences: the tested paired differences, one for each seed.
        direction: the result of the test; None if nothing is compared.
        tuned: the settings that trials have chosen; empty if nothing was tuned.
        run: whether there are runs; they may lack a value of the measure.
        verdict: the verdict by the rule (function `decided`).
        reason: why the figure or claim is not reproduced, if this is known.
    """

    kind: str
    setting: str
    method: str
    measure: str
    ours: Sample
    value: float | None
    spread: float | None
    differences: tuple[float, ...] = ()
    direction: str | None = None
    tuned: str = ""
    run: bool = True
    verdict: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Comparison:
    """The comparison of a folder with a paper.

    Attributes:
        paper: the figures and claims of the paper.
        scale: the scale of the runs; None if the command named none.
        changed: overrides of the command line that do not belong to the reproduction.
        missing: number of runs without a result.
        code: the versions of the code that made the runs.
        rows: one for each figure, then one for each comparison of a claim.
    """

    paper: Paper
    scale: str | None
    changed: tuple[str, ...]
    missing: int
    code: tuple[str, ...]
    rows: list[Row]


def judge(folder: Path) -> Comparison:
    """Compare the runs of an experiment's folder with the paper.

    Raises:
        ConfigError: the folder does not hold a reproduction.
    """
    read = results(folder)
    record = read.source.experiment
    if not record:
        raise ConfigError(f"{folder} is not the folder of an experiment: no experiment.json")
    paper = find(str(record.get("experiment")))
    scale, changed = _command(record.get("command", []))
    return compare(paper, read, scale, changed)


def compare(
    paper: Paper, read: Results, scale: str | None, changed: Sequence[str] = ()
) -> Comparison:
    """Compare runs with a paper.

    Args:
        paper: the figures and claims of the paper.
        read: the runs.
        scale: the scale of the runs.
        changed: overrides that do not belong to the reproduction.

    Raises:
        ConfigError: the runs have an axis that a figure does not name.
    """
    axis = str(read.source.experiment.get("report", {}).get("compare") or "method")
    runs = runs_of(read, axis, paper.hosts)
    labels = as_text(read.axes)
    refuse_open_axes(paper, axis, labels)
    bench = _Bench(paper, axis, labels, runs)
    return Comparison(
        paper,
        scale,
        tuple(changed),
        len(read.missing),
        tuple(sorted({_code(run) for run in runs})),
        decided([*bench.figures(), *bench.claims()], paper, scale, changed),
    )


def decided(
    rows: Sequence[Row], paper: Paper, scale: str | None, changed: Sequence[str]
) -> list[Row]:
    """Return all rows of a scale with their verdicts, and with reasons from the paper's file."""
    signs = [_sign(row, rows, paper) for row in rows]
    family = [
        (row.differences, sign) for row, sign in zip(rows, signs, strict=True) if sign is not None
    ]
    shown = iter(directions(family))
    found = [
        replace(row, direction=None if sign is None else next(shown))
        for row, sign in zip(rows, signs, strict=True)
    ]
    return [_judged(row, paper, scale, changed) for row in found]


def _sign(row: Row, rows: Sequence[Row], paper: Paper) -> float | None:
    """Return a number with the sign of the paper's difference; None without a comparison."""
    if row.kind == CLAIM:
        return 1.0
    place = (row.setting, paper.hosts.get(row.method), row.measure)
    theirs = next((host.value for host in rows if _place_of(host) == place), None)
    return None if row.value is None or theirs is None else row.value - theirs


def _judged(row: Row, paper: Paper, scale: str | None, changed: Sequence[str]) -> Row:
    if paper.compared_at(scale) == NOTHING:
        row = replace(row, direction=None)
    levels = paper.compared_at(scale) == LEVELS and paper.has_levels(row.measure)
    agrees = False if row.direction == NOT_SHOWN else None
    if row.kind == FIGURE:
        assert row.value is not None
        rounding = (row.spread or 0.0) if row.measure in measures.EXACT else None
        agrees = level(row.ours, row.value, rounding, share=measures.is_share(row.measure))
    found = verdict(row.ours, agrees, row.direction, levels=levels, run=row.run)
    missed = found == NOT_REPRODUCED
    reasons = {compared: claim.reason for claim in paper.claims for compared in _pairs(claim)}
    if row.kind == FIGURE:
        missed |= levels and found == DIRECTION_ONLY
        reasons = {_place_of(row): paper.reasons.get(row.method, "")}
    known = missed and paper.explains(scale, changed)
    return replace(row, verdict=found, reason=reasons.get(_place_of(row), "") if known else "")


def _place_of(row: Row) -> tuple[str, str, str]:
    return row.setting, row.method, row.measure


def _pairs(claim: Claim) -> list[tuple[str, str, str]]:
    """Return the keys (`_place_of`) of the rows of a claim."""
    greater = _words(claim.greater)
    return [(claim.says, f"{greater} above {_words(o)}", claim.measure) for o in claim.than]


def _command(lines: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the scale of a command, and its overrides that may change results."""
    pairs = by_key(lines)
    scale = value_of(pairs.pop("scale", "")) or None
    own = ("experiment", SEED, "on_other_code", "data_dir", "device")
    return scale, [
        line
        for key, line in pairs.items()
        if key not in own and not key.startswith(("hydra", "engine", "axes.", "--"))
    ]


def _code(run: ReproducedRun) -> str:
    code = run.cell.code
    return f"{code.get('version', '?')} at {str(code.get('commit') or '?')[:7]}"


@dataclass
class _Bench:
    """Makes the rows of a comparison from a paper and runs.

    Attributes:
        paper: the figures and claims of the paper.
        axis: the compared axis.
        labels: axis -> the labels of the experiment at this scale.
        runs: the runs with a result.
    """

    paper: Paper
    axis: str
    labels: dict[str, list[str]]
    runs: list[ReproducedRun]

    def figures(self) -> Iterator[Row]:
        """Yield a row for each figure of the paper that this scale has runs for."""
        for figure in self.paper.figures:
            place = {**figure.axes, self.axis: figure.method}
            if not self._has(place):
                continue
            chosen = self._where(place)
            ours = sample(chosen, figure.measure)
            host = {**figure.axes, self.axis: self.paper.hosts.get(figure.method, "")}
            yield Row(
                FIGURE,
                ", ".join(f"{k}={v}" for k, v in figure.axes.items()),
                figure.method,
                figure.measure,
                ours,
                figure.value,
                figure.spread,
                tested(paired(chosen, self._where(host), {self.axis}), figure.measure),
                tuned=tuned(chosen),
                run=bool(chosen),
            )

    def claims(self) -> Iterator[Row]:
        """Yield a row for each comparison of each claim."""
        for claim in self.paper.claims:
            for other in claim.than:
                if not self._has({**claim.where, **claim.greater}) or not self._has(other):
                    continue
                greater = self._where({**claim.where, **claim.greater})
                less = self._where({**claim.where, **other})
                pairs = paired(greater, less, {*claim.greater, *other})
                yield Row(
                    CLAIM,
                    claim.says,
                    f"{_words(claim.greater)} above {_words(other)}",
                    claim.measure,
                    Sample.of(differences(pairs, claim.measure)),
                    None,
                    None,
                    tested(pairs, claim.measure),
                    tuned=tuned(greater, less),
                    run=bool(greater and less),
                )

    def _where(self, labels: Mapping[str, str]) -> list[ReproducedRun]:
        return [
            run
            for run in self.runs
            if all(str(run.cell.axes.get(axis)) == label for axis, label in labels.items())
        ]

    def _has(self, place: Mapping[str, str]) -> bool:
        """Whether this scale has all of these labels."""
        return all(label in self.labels.get(axis, ()) for axis, label in place.items())


def _words(labels: Mapping[str, str]) -> str:
    return ", ".join(
        label if axis == "method" else f"{axis}={label}" for axis, label in labels.items()
    )


# ---- measured values by seed, and their differences
def sample(runs: Sequence[ReproducedRun], measure: str) -> Sample:
    """Return the measured values of the runs; runs without a value are left out."""
    values = (measures.value(measure, run) for run in runs)
    return Sample.of([value for value in values if math.isfinite(value)])


def paired(
    ours: Sequence[ReproducedRun], theirs: Sequence[ReproducedRun], differing: Collection[str]
) -> Pairs:
    """Pair runs that differ on these axes only; keys are the seed and the other axes."""

    def place(run: ReproducedRun) -> tuple[str, Place]:
        axes = {axis: str(label) for axis, label in run.cell.axes.items() if axis not in differing}
        return axes.pop(SEED, ""), tuple(axes.items())

    partners = {place(run): run for run in theirs}
    return {place(run): (run, partners[place(run)]) for run in ours if place(run) in partners}


def differences(pairs: Pairs, measure: str) -> list[float]:
    """Return a difference for each seed: the mean over settings that have all seeds.

    If seeds had different settings, they would differ for this reason alone.
    """
    by_seed: dict[str, dict[Place, float]] = {}
    for (seed, place), (run, partner) in pairs.items():
        difference = measures.value(measure, run) - measures.value(measure, partner)
        if math.isfinite(difference):
            by_seed.setdefault(seed, {})[place] = difference
    if not by_seed:
        return []
    every = set.intersection(*(set(found) for found in by_seed.values()))
    return [mean(found[p] for p in sorted(every)) for found in by_seed.values()] if every else []


def tested(pairs: Pairs, measure: str) -> tuple[float, ...]:
    """Return the differences, rounded as in files.

    There are none if the tuned values of a pair differ and too few seeds chose them.
    """
    for run, partner in pairs.values():
        seeds = (run.results.source.experiment.get("tune") or {}).get("seeds", ())
        if run.cell.tuned != partner.cell.tuned and len(seeds) < FEWEST_TUNING_SEEDS:
            return ()
    return tuple(float(f"{difference:.6g}") for difference in differences(pairs, measure))


def tuned(*groups: Sequence[ReproducedRun]) -> str:
    """Return the tuned settings of the runs, and say which lie at the edge of their grid.

    Args:
        groups: the runs of a row; for a claim, the runs of each of its two sides.

    Returns:
        For example `client.lr=0.03, at the edge`, or `client.lr=0.03 against client.lr=0.1`; empty
        if nothing was tuned.
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
