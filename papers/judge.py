"""The runs of a folder beside what the paper says of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean

from fedhet.config.lines import by_key, value_of
from fedhet.core.errors import ConfigError
from fedhet.experiment.axes import SEED
from fedhet.report.results import Results, results
from papers import measures
from papers.measures import EXACT, is_share
from papers.paper import (
    DIRECTIONS,
    LEVELS,
    Claim,
    Figure,
    Paper,
    as_text,
    find,
    refuse_open_axes,
)
from papers.runs import ReproducedRun, runs_of
from papers.verdict import (
    DIRECTION_ONLY,
    FEWEST,
    NOT_REPRODUCED,
    Sample,
    direction,
    level,
    verdict,
)

FIGURE, CLAIM = "figure", "claim"
Place = tuple[tuple[str, str], ...]  # axis and label, of some of the axes


@dataclass(frozen=True)
class Row:
    """A row of the comparison.

    Attributes:
        kind: FIGURE or CLAIM.
        setting: the axes without the method and the seed; the text of a claim.
        method: what is measured; for a claim, what is compared with what.
        measure: the measure.
        ours: our values, one for each seed; of a claim, the differences.
        value: the paper's figure; None for a claim.
        spread: the paper's spread, or None.
        direction: what the order shows; None where the paper compares nothing.
        tuned: the settings that trials have chosen; empty if nothing was tuned.
        run: whether there are runs, if perhaps without such a value.
        verdict: the verdict by the rule, as `decided` says.
        reason: why it is not reproduced, where that is known.
    """

    kind: str
    setting: str
    method: str
    measure: str
    ours: Sample
    value: float | None
    spread: float | None
    direction: str | None
    tuned: str = ""
    run: bool = True
    verdict: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Comparison:
    """All that is compared in a folder.

    Attributes:
        paper: what the paper says.
        scale: the scale of the runs; None if the command named none.
        changed: the overrides of the command line that are no part of the reproduction.
        missing: how many runs have no result.
        code: the versions of the code that ran them.
        figures: one row for each figure.
        claims: one for each comparison that a claim makes.
    """

    paper: Paper
    scale: str | None
    changed: tuple[str, ...]
    missing: int
    code: tuple[str, ...]
    figures: list[Row] = field(default_factory=list)
    claims: list[Row] = field(default_factory=list)

    @property
    def rows(self) -> list[Row]:
        """All rows."""
        return [*self.figures, *self.claims]


def judge(folder: Path) -> Comparison:
    """Compare the runs of an experiment's folder with the paper.

    Raises:
        ConfigError: the folder is not that of a reproduction.
    """
    read = results(folder)
    record = read.source.experiment
    if not record:
        raise ConfigError(f"{folder} is not the folder of an experiment")
    paper = find(str(record.get("experiment")))
    scale, changed = _command(record.get("command", []))
    return compare(paper, read, scale, changed)


def compare(
    paper: Paper, read: Results, scale: str | None, changed: Sequence[str] = ()
) -> Comparison:
    """Compare runs with a paper.

    Args:
        paper: what the paper says.
        read: the runs.
        scale: the scale at which they were run.
        changed: overrides that are no part of the reproduction.

    Raises:
        ConfigError: the runs have an axis that a figure does not name.
    """
    axis = str(read.source.experiment.get("report", {}).get("compare") or "method")
    runs = runs_of(read, axis, paper.hosts)
    labels = as_text(read.axes)
    refuse_open_axes(paper, axis, labels)
    directions = paper.compared_at(scale) in (LEVELS, DIRECTIONS)
    bench = _Bench(paper, axis, labels, runs, directions)
    figures, claims = (
        [decided(row, paper, scale, changed) for row in rows]
        for rows in (bench.figures(), bench.claims())
    )
    return Comparison(
        paper,
        scale,
        tuple(changed),
        len(read.missing),
        tuple(sorted({_code(run) for run in runs})),
        figures,
        claims,
    )


def decided(row: Row, paper: Paper, scale: str | None, changed: Sequence[str]) -> Row:
    """The row with its verdict, and the reason that the paper's file has for it."""
    levels = paper.compared_at(scale) == LEVELS and paper.has_levels(row.measure)
    agrees = False if row.ours.count >= FEWEST else None
    if row.kind == FIGURE:
        assert row.value is not None
        rounding = (row.spread or 0.0) if row.measure in EXACT else None
        agrees = level(row.ours, row.value, rounding, share=is_share(row.measure))
    found = verdict(row.ours, agrees, row.direction, levels=levels, directions=True, run=row.run)
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
    """What tells the rows of a claim."""
    greater = _words(claim.greater)
    return [(claim.says, f"{greater} above {_words(o)}", claim.measure) for o in claim.than]


def _command(lines: Sequence[str]) -> tuple[str | None, list[str]]:
    """The scale of a command, and what it changes beyond the seeds and the folder."""
    pairs = by_key(lines)
    scale = value_of(pairs.pop("scale", "")) or None
    own = ("experiment", SEED, "on_other_code", "data_dir", "device")
    changed = [
        line
        for key, line in pairs.items()
        if key not in own and not key.startswith(("hydra", "engine", "axes.", "--"))
    ]
    return scale, changed


def _code(run: ReproducedRun) -> str:
    code = run.cell.code
    return f"{code.get('version', '?')} at {str(code.get('commit') or '?')[:7]}"


@dataclass
class _Bench:
    """The paper and the runs side by side.

    Attributes:
        paper: what the paper says.
        axis: the axis that is compared.
        labels: axis -> the labels that the experiment has at this scale.
        runs: those with a result.
        directions: whether directions are compared.
    """

    paper: Paper
    axis: str
    labels: dict[str, list[str]]
    runs: list[ReproducedRun]
    directions: bool

    def figures(self) -> Iterator[Row]:
        """A row per figure of the paper that the runs can be compared with."""
        for figure in self.paper.figures:
            place = {**figure.axes, self.axis: figure.method}
            if not self._has(place):
                continue
            chosen = self._where(place)
            ours = sample(chosen, figure.measure)
            shown = self._against_host(figure, chosen)
            yield Row(
                FIGURE,
                ", ".join(f"{k}={v}" for k, v in figure.axes.items()),
                figure.method,
                figure.measure,
                ours,
                figure.value,
                figure.spread,
                shown if self.directions else None,
                tuned(chosen),
                bool(chosen),
            )

    def claims(self) -> Iterator[Row]:
        """A row per pair of a claim."""
        for claim in self.paper.claims:
            for other in claim.than:
                if not self._has({**claim.where, **claim.greater}) or not self._has(other):
                    continue
                greater = self._where({**claim.where, **claim.greater})
                less = self._where({**claim.where, **other})
                differing = {*claim.greater, *other}
                ours = Sample.of(differences(greater, less, claim.measure, differing))
                shown = direction(ours, 1.0)
                yield Row(
                    CLAIM,
                    claim.says,
                    f"{_words(claim.greater)} above {_words(other)}",
                    claim.measure,
                    ours,
                    None,
                    None,
                    shown if self.directions else None,
                    tuned(greater, less),
                    bool(greater and less),
                )

    def _against_host(self, figure: Figure, chosen: Sequence[ReproducedRun]) -> str | None:
        host = self.paper.hosts.get(figure.method)
        theirs = host and self.paper.figure(host, figure.axes, figure.measure)
        if not host or not theirs:
            return None
        others = self._where({**figure.axes, self.axis: host})
        shown = differences(chosen, others, figure.measure, {self.axis})
        return direction(Sample.of(shown), figure.value - theirs.value)

    def _where(self, labels: Mapping[str, str]) -> list[ReproducedRun]:
        return [
            run
            for run in self.runs
            if all(str(run.cell.axes.get(axis)) == label for axis, label in labels.items())
        ]

    def _has(self, place: Mapping[str, str]) -> bool:
        """Whether this scale has such a setting."""
        return all(label in self.labels.get(axis, ()) for axis, label in place.items())


def _words(labels: Mapping[str, str]) -> str:
    return ", ".join(
        label if axis == "method" else f"{axis}={label}" for axis, label in labels.items()
    )


# ---- what runs measure, seed by seed, alone and against other runs
def sample(runs: Sequence[ReproducedRun], measure: str) -> Sample:
    """What each run measures; runs without a value are left out."""
    values = (measures.value(measure, run) for run in runs)
    return Sample.of([value for value in values if math.isfinite(value)])


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
