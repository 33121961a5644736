"""Tuning: the values of settings to try, and the choice among the trials.

Each compared value (each method) gets the same number of trials in each setting. No reported run
has the seed of a trial. The clients' validation data decide; no test score is read.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import mean
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override

from fedhet.core.check import each, integer, one_of, optional
from fedhet.core.errors import ConfigError
from fedhet.runs.config import overrides
from fedhet.runs.config.experiment_file import SEED, mapping
from fedhet.runs.record.schema import FEWEST_OF_A_GRID
from fedhet.study.axes import Label, Setting, Value, single_values


@dataclass(frozen=True)
class Interval:
    """An interval from which the values of trials are drawn.

    Attributes:
        low: its lower end.
        high: its upper end.
        log: whether to draw the logarithm uniformly; else the value is drawn uniformly.
    """

    low: float
    high: float
    log: bool


Space = dict[str, "tuple[Any, ...] | Interval"]  # setting -> its values
Point = dict[str, Any]  # setting -> one value


@dataclass(frozen=True)
class Tuning:
    """The tuning of an experiment.

    Attributes:
        budget: number of trials of each method in each setting. None: try the whole grids, which
            must then have equal sizes. If one grid is smaller than the budget, all grids must have
            the size of this grid.
        seeds: the seeds of the trials; each trial is run with all of them.
        space: the settings that are tuned in all runs.
        own: label of a value of an axis -> the settings that are tuned for this value in addition.
        per: axes; each combination of their values gets its own choice, with the best mean over
            the remaining axes and the seeds.
        chosen: a combination of `per` -> the chosen values from the experiment's file; there are no
            trials then. None: trials choose.
    """

    budget: int | None
    seeds: tuple[int, ...]
    space: Space
    own: dict[str, Space]
    per: tuple[str, ...]
    chosen: dict[Setting, Point] | None = None

    def space_of(self, labels: Sequence[object]) -> Space:
        """Return the settings that are tuned for a combination of labels."""
        own = (self.own.get(str(label), {}) for label in labels)
        return {key: values for space in (self.space, *own) for key, values in space.items()}

    def record(self) -> dict[str, Any]:
        """Return the entry for experiment.json."""

        def written(space: Space) -> dict[str, Any]:
            return {
                key: vars(values) if isinstance(values, Interval) else list(values)
                for key, values in space.items()
            }

        return {
            "budget": self.budget,
            "seeds": list(self.seeds),
            "space": written(self.space),
            "own": {label: written(space) for label, space in self.own.items()},
            "per": list(self.per),
        }


def points(space: Space, budget: int | None) -> list[Point]:
    """Return the points to try: the whole grid, or `budget` draws from the grid or intervals.

    The same space and budget always give the same points.

    Raises:
        ConfigError: the space has an interval, but there is no budget.
    """
    if not any(isinstance(values, Interval) for values in space.values()):
        combinations = product(*(tuple(values) for values in space.values()))  # type: ignore[arg-type]
        every = [dict(zip(space, values, strict=True)) for values in combinations]
        if budget is None or len(every) <= budget:
            return every
    if budget is None:
        raise ConfigError(
            "tune.budget=null: tune.space or tune.own has an interval; set the number of trials"
        )
    return _drawn(space, budget)


def _drawn(space: Space, budget: int) -> list[Point]:
    from scipy.stats import loguniform, uniform
    from sklearn.model_selection import ParameterSampler

    distributions: dict[str, Any] = {
        key: list(values)
        if not isinstance(values, Interval)
        else loguniform(values.low, values.high)
        if values.log
        else uniform(values.low, values.high - values.low)
        for key, values in space.items()
    }
    drawn = ParameterSampler(distributions, n_iter=budget, random_state=0)
    return [
        {
            key: _rounded(point[key], values) if isinstance(values, Interval) else point[key]
            for key, values in space.items()
        }
        for point in drawn
    ]


def _rounded(value: float, interval: Interval) -> float:
    """Round the value to three digits, or more if the interval is narrow; keep it inside."""
    largest = max(abs(interval.low), abs(interval.high))
    digits = 3 + max(0, math.floor(math.log10(largest / (interval.high - interval.low))))
    return min(max(float(f"{value:.{digits}g}"), interval.low), interval.high)


def check_budget(tuning: Tuning, combinations: Sequence[Sequence[object]]) -> None:
    """Refuse grids that would give combinations different numbers of trials.

    Args:
        tuning: the tuning.
        combinations: the labels of each combination of the axes, without the seed.

    Raises:
        ConfigError: the numbers differ; the message names two combinations.
    """
    sizes = {tuple(c): len(points(tuning.space_of(c), tuning.budget)) for c in combinations}
    least, most = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
    if sizes[least] != sizes[most]:
        names = [", ".join(map(str, labels)) for labels in (least, most)]
        raise ConfigError(
            f"tune.budget={'null' if tuning.budget is None else tuning.budget}: {names[0]} would"
            f" have {sizes[least]} trials, and {names[1]} would have {sizes[most]}; tune.budget="
            f"{sizes[least]} makes the numbers equal, as do more values of the first in tune.own"
        )


def best(scores: Mapping[str, Sequence[float | None]]) -> tuple[str, float] | None:
    """Return the name and the mean validation score of the best trial; None if none has succeeded.

    If several trials are equal, the first one wins.

    Args:
        scores: name of a trial -> its validation scores, one for each seed. None or NaN means that
            a run is missing or has diverged; such a trial cannot win.
    """
    means: dict[str, float] = {
        name: float(mean(values))  # type: ignore[type-var, arg-type]
        for name, values in scores.items()
        if values and all(value is not None and math.isfinite(value) for value in values)
    }
    return max(means.items(), key=operator.itemgetter(1), default=None)


def at_the_edge(point: Point, space: Space) -> list[str]:
    """Return the settings with a chosen value at the edge of their grid.

    A better value may lie beyond the edge. Grids with fewer than three values are left out, because
    each of their values is at an edge.
    """
    grids = {
        key: values
        for key, values in space.items()
        if not isinstance(values, Interval) and len(values) >= FEWEST_OF_A_GRID
    }
    return [
        key
        for key, values in grids.items()
        if all(type(value) in (int, float) for value in values)
        and point[key] in (min(values), max(values))
    ]


# ---- the entry `tune` of an experiment's file
def read_tuning(
    declared: Mapping[str, Any],
    axes: Mapping[str, Sequence[Value]],
    settings: Mapping[str, Override],
    of_file: Mapping[str, Sequence[Value]],
    seed: object,
) -> Tuning | None:
    """Read the tuning of an experiment. A setting that the command line gives is not tuned.

    Args:
        declared: the entry `tune` of the file, with the overrides of the command line.
        axes: axis -> its values.
        settings: key -> the override of the command line, or of the scale.
        of_file: axis -> its values in the file.
        seed: the seed of the runs if `seed` is no axis.

    Raises:
        ConfigError: the entry has the wrong form, or names a label that no axis has.
    """

    def space(name: str, values: object) -> Space:
        return {
            key: _range(f"{name}.{key}", key, range_)
            for key, range_ in mapping(name, values).items()
            if key not in settings
        }

    budget = optional(integer, "tune.budget", declared["budget"], low=1)
    seeds = each(integer, "tune.seeds", declared["seeds"], low=0)
    shared = space("tune.space", declared["space"])
    own = {}
    labels = [str(value.label) for axis in axes.values() for value in axis]
    # The command line or the scale may leave out values that the file has.
    left_out = {str(value.label) for axis in of_file.values() for value in axis}.difference(labels)
    for label, values in mapping("tune.own", declared["own"]).items():
        if label not in left_out:
            one_of("tune.own", label, labels)
            own[label] = space(f"tune.own.{label}", values)
    if not shared and not any(own.values()):
        return None
    for key in {*shared, *(key for values in own.values() for key in values)}:
        if key in axes:
            raise ConfigError(f"tune.space.{key}: an axis has this name; it cannot be tuned too")
    if not seeds:
        raise ConfigError("tune.seeds=[]: the trials need a seed")
    _check_seeds(seeds, axes, seed)
    choices = [axis for axis in axes if axis != SEED]
    per = choices if declared["per"] is None else declared["per"]
    per = per if isinstance(per, list) else [per]
    for axis in per:
        one_of("tune.per", axis, choices)
    for label in own:
        if not any(label == str(value.label) for axis in per for value in axes[axis]):
            raise ConfigError(
                f"tune.own.{label}: settings are chosen for each {' and '.join(per)}"
                f" (tune.per), and {label} is a value of another axis; its trials would be compared"
                " with trials of other values"
            )
    tuning = Tuning(budget, seeds, shared, own, tuple(per))
    if declared["chosen"] is None:
        return tuning
    return replace(tuning, chosen=_chosen(declared["chosen"], tuning, axes, of_file, settings))


def _chosen(
    declared: object,
    tuning: Tuning,
    axes: Mapping[str, Sequence[Value]],
    of_file: Mapping[str, Sequence[Value]],
    settings: Collection[str],
) -> dict[Setting, Point]:
    """Read the choices of earlier trials from the file, in the order of the axes."""
    if not isinstance(declared, list):
        raise ConfigError(f"tune.chosen={declared}: a list of choices, or null, is expected")
    labels = {
        axis: [v.label for v in values] for axis, values in axes.items() if axis in tuning.per
    }
    wanted = [tuple(zip(labels, values, strict=True)) for values in product(*labels.values())]
    chosen: dict[Setting, Point] = {}
    for number, entry in enumerate(declared):
        name = f"tune.chosen[{number}]"
        point = mapping(name, entry)
        place = tuple((axis, point.pop(axis, None)) for axis in labels)
        for axis, label in place:
            left_out = [value.label for value in of_file.get(axis, ())]
            one_of(f"{name}.{axis}", str(label), dict.fromkeys(map(str, labels[axis] + left_out)))
        if place not in wanted:  # the command line or the scale has left this value out
            continue
        space = tuning.space_of([label for _, label in place])
        for key in sorted({*space, *point}.difference(settings)):
            one_of(name, key, space)
            if key not in point or not _within(point[key], space[key]):
                raise ConfigError(
                    f"{name}: {key}={point.get(key)} is not among the values to try (tune.space"
                    " and tune.own)"
                )
        if place in chosen:
            raise ConfigError(f"{name}: this is the second choice for {_text(place)}; remove one")
        chosen[place] = {key: point[key] for key in space}
    if missing := [place for place in wanted if place not in chosen]:
        raise ConfigError(
            f"tune.chosen: there is no choice for {_text(missing[0])}; use tune.chosen=null to"
            " repeat the trials"
        )
    return chosen


def _text(place: Setting) -> str:
    return ", ".join(f"{axis}={label}" for axis, label in place)


def _within(value: object, values: tuple[Any, ...] | Interval) -> bool:
    if isinstance(values, Interval):
        return isinstance(value, (int, float)) and values.low <= value <= values.high
    return value in values


def _range(name: str, key: str, declared: object) -> tuple[Label | list[Any], ...] | Interval:
    """Return the values of a tuned setting, or the interval that they are drawn from."""
    if isinstance(declared, str):
        (override,) = overrides.parse([f"{key}={declared}"])
        sweep = override.value()
        if isinstance(sweep, IntervalSweep):
            low, high = float(sweep.start or 0), float(sweep.end or 0)
            log = "log" in sweep.tags
            if low >= high or (log and low <= 0):
                raise ConfigError(f"{name}={declared}: the ends of this interval are not allowed")
            return Interval(low, high, log)
        declared = single_values(override)
    if not isinstance(declared, list) or any(isinstance(value, dict) for value in declared):
        raise ConfigError(f"{name}={declared}: a list of values, or interval(a,b), is expected")
    if not declared:
        raise ConfigError(f"{name}=[]: there is no value to try")
    return tuple(declared)


def _check_seeds(seeds: Sequence[int], axes: Mapping[str, Sequence[Value]], seed: object) -> None:
    lines = {
        line.lstrip("+") for axis in axes.values() for value in axis for line in value.overrides
    }
    if SEED not in axes:
        lines.add(f"{SEED}={seed}")
    if both := [number for number in seeds if f"{SEED}={number}" in lines]:
        raise ConfigError(
            f"tune.seeds={list(seeds)}: seed {min(both)} is also a seed of the runs; the tuning"
            " must not see their results"
        )
