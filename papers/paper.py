"""Reads a paper's figures and claims from the key `paper` of an experiment's file.

It does not load Hydra, so that the list of all reproductions appears at once.

paper:
  source: FedLEx, table I            the place of the figures in the paper
  also: [figure2]                    other figures of the paper that show the same runs
  measure: clients                   the measure of the figures (measures.py)
  unit: percent                      the unit of all figures: percent or 1
  hosts: {FedLExProx: FedProx}       method -> its base method; the order of the two is compared
  figures:                           an entry for each setting: its axes, and the values by method
    - {clients: 100, values: {FedProx: [67.70, 4.16], FedLExProx: [84.53, 2.55]}}
  claims:                            orders that the paper states in words, or shows in plots
    - {says: ..., measure: last, greater: {cv_t: 0.2}, than: [{cv_t: 0.1}]}
  compared: {cpu: directions}        what a scale can compare: levels, directions or nothing
  data: {paper: MNIST, ...}          scale -> the data and models that it needs
  open: [...]                        points that the paper leaves open, and our choices
  reasons: {FedLExProx: ...}         why a figure is not reproduced, if this is known
  explained: [cpu]                   the scales for which reasons hold (also reasons of claims)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from fedhet.core.check import did_you_mean, one_of
from fedhet.core.errors import ConfigError
from fedhet.runs.config import catalogue
from fedhet.runs.config.lines import key_of

Labels = dict[str, str]  # axis -> the label of a value
GROUP = "experiment"
LEVELS, DIRECTIONS, NOTHING = "levels", "directions", "nothing"
COMPARED = {"paper": LEVELS, "cpu": DIRECTIONS, "smoke": NOTHING}
UNITS = {"percent": 100.0, "1": 1.0}
_KEYS = {
    *("source", "also", "measure", "unit", "hosts", "figures", "claims", "compared", "data"),
    *("open", "reasons", "explained"),
}


@dataclass(frozen=True)
class Figure:
    """A figure that the paper prints.

    Attributes:
        axes: axis -> label, for the axes that the paper names.
        method: the label on the compared axis.
        measure: the name of the measure.
        value: the figure; accuracies are shares.
        spread: the number that the paper prints behind +-; None if there is none.
        levels: whether levels can be compared. Times on another machine cannot.
    """

    axes: Labels
    method: str
    measure: str
    value: float
    spread: float | None
    levels: bool = True


@dataclass(frozen=True)
class Claim:
    """An order that the paper states in words, or shows in a plot without figures.

    Attributes:
        says: the paper's statement in a sentence.
        measure: the name of the measure.
        where: labels that all compared runs share.
        greater: the labels of the runs with the greater measure.
        than: labels of the other runs; each entry is one comparison.
        reason: why the claim does not hold here, if this is known.
    """

    says: str
    measure: str
    where: Labels
    greater: Labels
    than: tuple[Labels, ...]
    reason: str = ""


@dataclass(frozen=True)
class Paper:
    """The paper's side of one reproduction.

    Attributes:
        name: the name of the experiment, such as `fedlex/table1`.
        title: the title of the experiment.
        source: the place of the figures in the paper.
        also: other names of the reproduction.
        hosts: method -> its base method.
        figures: the paper's figures.
        claims: orders that the paper states in words or shows in plots.
        compared: scale -> what may be compared: LEVELS, DIRECTIONS or NOTHING.
        data: scale -> the data and models that the runs need.
        axes: the axes of the experiment.
        choices: points that the paper leaves open, and our choices.
        reasons: method -> why its figures are not reproduced.
        explained: the scales for which the reasons of figures and claims hold.
    """

    name: str
    title: str
    source: str
    also: tuple[str, ...] = ()
    hosts: dict[str, str] = field(default_factory=dict)
    figures: tuple[Figure, ...] = ()
    claims: tuple[Claim, ...] = ()
    compared: dict[str, str] = field(default_factory=lambda: dict(COMPARED))
    data: dict[str, str] = field(default_factory=dict)
    axes: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    reasons: dict[str, str] = field(default_factory=dict)
    explained: tuple[str, ...] = ("cpu",)

    @property
    def measures(self) -> set[str]:
        """The measures of its figures and claims."""
        return {f.measure for f in self.figures} | {c.measure for c in self.claims}

    def compared_at(self, scale: str | None) -> str:
        """Return what can be compared at a scale; without a scale, runs are like the paper's."""
        return self.compared.get(scale or "", LEVELS)

    def explains(self, scale: str | None, changed: Sequence[str]) -> bool:
        """Whether its reasons hold for runs of this scale, with these overrides."""
        return scale in self.explained and all(key_of(line) in self.axes for line in changed)

    def has_levels(self, measure: str) -> bool:
        """Whether the levels of a measure can be compared; for example, times cannot."""
        return all(figure.levels for figure in self.figures if figure.measure == measure)


def every() -> list[Paper]:
    """Return all reproductions, ordered by name."""
    found = (
        (name, catalogue.content(GROUP, name)) for name in catalogue.choices(GROUP) if "/" in name
    )
    return [_read(name, content) for name, content in found if "paper" in content]


def find(name: str) -> Paper:
    """Return the reproduction with this name, or with this name in `also`.

    Raises:
        ConfigError: there is no such reproduction, or its file is wrong.
    """
    papers = {alias: paper for paper in every() for alias in (*paper.also, paper.name)}
    if name not in papers:
        raise ConfigError(
            f"there is no reproduction {name!r}{did_you_mean(name, papers)};"
            " python -m fedhet reproduce --list shows all"
        )
    return papers[name]


def as_text(axes: Mapping[str, Sequence[object]]) -> dict[str, list[str]]:
    """Return axis -> its labels as text, the form of labels in figures and claims."""
    return {axis: list(map(str, labels)) for axis, labels in axes.items()}


def refuse_open_axes(paper: Paper, compare: str, labels: Mapping[str, Sequence[str]]) -> None:
    """Refuse several settings for one figure, because they would count as seeds.

    Args:
        paper: the figures and claims of the paper.
        compare: the axis of the methods.
        labels: axis -> the labels of the experiment.

    Raises:
        ConfigError: a figure leaves an axis open; the message names the axis.
    """
    from fedhet.runs.config.experiment_file import (
        SEED,  # it loads hydra, which a list does not need
    )

    several = [axis for axis, values in labels.items() if len(values) > 1]
    for figure in paper.figures:
        place = {**figure.axes, compare: figure.method}
        if not all(label in labels.get(axis, ()) for axis, label in place.items()):
            continue
        for axis in several:
            if axis not in (*place, SEED):
                raise ConfigError(
                    f"{paper.name}: the paper's figure for {figure.method} does not name a value of"
                    f" {axis}, which has several values here ({', '.join(labels[axis])}); give the"
                    " axis one value"
                )


def _read(name: str, file: Mapping[str, Any]) -> Paper:
    where = f"experiment={name}: paper"
    content = file["paper"]
    if not isinstance(content, Mapping) or not content.get("source"):
        raise ConfigError(f"{where}: must be a mapping with an entry `source`")
    for key in content:
        one_of(where, key, sorted(_KEYS))
    unit = UNITS[one_of(f"{where}.unit", str(content.get("unit", 1)), UNITS)]
    measure = str(content.get("measure", "last"))
    folder = name.rpartition("/")[0]
    compared = {**COMPARED, **content.get("compared", {})}
    for scale, kind in compared.items():
        one_of(f"{where}.compared.{scale}", kind, (LEVELS, DIRECTIONS, NOTHING))
    paper = Paper(
        name=name,
        title=catalogue.title(GROUP, name),
        source=str(content["source"]),
        also=tuple(f"{folder}/{other}" for other in content.get("also", [])),
        hosts=_labels(content.get("hosts", {})),
        figures=tuple(_figures(f"{where}.figures", content.get("figures", []), measure, unit)),
        claims=tuple(_claim(f"{where}.claims", c, measure) for c in content.get("claims", [])),
        compared=compared,
        data=_labels(content.get("data", {})),
        axes=tuple(map(str, file.get("axes") or ())),
        choices=tuple(content.get("open", [])),
        reasons=_labels(content.get("reasons", {})),
        explained=tuple(content.get("explained", Paper.explained)),
    )
    _refuse_unknown_labels(where, paper, file)
    return paper


def _refuse_unknown_labels(where: str, paper: Paper, file: Mapping[str, Any]) -> None:
    """Refuse labels that no run has: the comparison would leave them out without a message."""
    axes = file.get("axes") or {}
    compare = (file.get("report") or {}).get("compare") or "method"
    places = [{**figure.axes, compare: figure.method} for figure in paper.figures]
    places += [{compare: method} for pair in paper.hosts.items() for method in pair]
    places += [{compare: method} for method in paper.reasons]
    for claim in paper.claims:
        places += [claim.where, claim.greater, *claim.than]
    for axis, label in (item for place in places for item in place.items()):
        one_of(where, axis, axes)
        if isinstance(axes[axis], list | Mapping):  # the other form is a sweep, as range(0,3)
            one_of(f"{where}: {axis}", label, list(map(str, axes[axis])))


def _figures(
    where: str, groups: Sequence[Mapping[str, Any]], measure: str, unit: float
) -> Iterator[Figure]:
    for group in groups:
        known = ("values", "measure", "levels", "unit")
        axes = {str(k): str(v) for k, v in group.items() if k not in known}
        own_unit = (
            UNITS[one_of(f"{where}.unit", str(group["unit"]), UNITS)] if "unit" in group else unit
        )
        if not isinstance(group.get("values"), Mapping):
            raise ConfigError(f"{where}: {dict(group)} has no `values`")
        for method, written in group["values"].items():
            pair = written if isinstance(written, list) else [written]
            numbers = [float(number) / own_unit for number in pair]
            if len(numbers) > 2 or not all(map(math.isfinite, numbers)):
                raise ConfigError(
                    f"{where}: {method}: {written} must be a figure or [figure, spread]"
                )
            yield Figure(
                axes,
                str(method),
                str(group.get("measure", measure)),
                numbers[0],
                numbers[1] if len(numbers) == 2 else None,
                bool(group.get("levels", True)),
            )


def _claim(where: str, claim: Mapping[str, Any], measure: str) -> Claim:
    for key in claim:
        one_of(where, key, [known.name for known in fields(Claim)])
    for key in ("says", "greater", "than"):
        if not claim.get(key):
            raise ConfigError(f"{where}: {dict(claim)} has no `{key}`")
    return Claim(
        str(claim["says"]),
        str(claim.get("measure", measure)),
        _labels(claim.get("where", {})),
        _labels(claim["greater"]),
        tuple(map(_labels, claim["than"] if isinstance(claim["than"], list) else [claim["than"]])),
        str(claim.get("reason", "")),
    )


def _labels(values: Mapping[Any, Any]) -> Labels:
    return {str(key): str(value) for key, value in values.items()}
