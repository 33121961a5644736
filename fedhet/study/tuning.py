"""Tuning: trials with few settings' values, and the choice among them.

Each value that is compared (each method) gets the same number of trials in each setting, on seeds
that no reported run has, and the clients' validation data decide. No test score is looked at.
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
from fedhet.study.axes import Label, Setting, Value, single_values

FEWEST_OF_A_GRID = 3  # values: of fewer, none lies inside


@dataclass(frozen=True)
class Interval:
    """An interval of values, from which trials are drawn.

    Attributes:
        low: its lower end.
        high: its upper end.
        log: whether the logarithm is drawn uniformly, and not the value.
    """

    low: float
    high: float
    log: bool


Space = dict[str, "tuple[Any, ...] | Interval"]  # setting -> its values
Point = dict[str, Any]  # setting -> one value


@dataclass(frozen=True)
class Tuning:
    """What is tuned.

    Attributes:
        budget: the number of trials of each method in each setting; None for the whole grids, which
            must then be of equal size. No grid may be smaller than the budget if others are not.
        seeds: the seeds of the trials, each of which is run with all of them.
        space: the settings that are tuned for all.
        own: label of a value of an axis -> the settings that are tuned for it in addition.
        per: the axes for each combination of whose values there is one choice; it has the best mean
            over the others.
        chosen: such a combination -> the values that the file of the experiment keeps, so that
            there are no trials; None if trials choose.
    """

    budget: int | None
    seeds: tuple[int, ...]
    space: Space
    own: dict[str, Space]
    per: tuple[str, ...]
    chosen: dict[Setting, Point] | None = None

    def space_of(self, labels: Sequence[object]) -> Space:
        """The settings that are tuned for a combination of values."""
        own = (self.own.get(str(label), {}) for label in labels)
        return {key: values for space in (self.space, *own) for key, values in space.items()}

    def record(self) -> dict[str, Any]:
        """The content of experiment.json."""

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
    """The values to try: the whole grid, or `budget` of its points or draws.

    The same space leads to the same points.

    Raises:
        ConfigError: an interval without a budget.
    """
    grid = all(not isinstance(values, Interval) for values in space.values())
    if grid:
        combinations = product(*(tuple(values) for values in space.values()))  # type: ignore[arg-type]
        every = [dict(zip(space, values, strict=True)) for values in combinations]
        if budget is None or len(every) <= budget:
            return every
    if budget is None:
        raise ConfigError(
            "tune.budget=null: an interval has no last value; give a number of trials"
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
    """The value with three digits, and with more if the interval is narrow; it stays inside."""
    largest = max(abs(interval.low), abs(interval.high))
    digits = 3 + max(0, math.floor(math.log10(largest / (interval.high - interval.low))))
    return min(max(float(f"{value:.{digits}g}"), interval.low), interval.high)


def check_budget(tuning: Tuning, combinations: Sequence[Sequence[object]]) -> None:
    """Refuse grids with which the numbers of trials would not be equal.

    Args:
        tuning: what is tuned.
        combinations: the labels of the axes' values, but for the seeds.

    Raises:
        ConfigError: naming two of them.
    """
    sizes = {tuple(c): len(points(tuning.space_of(c), tuning.budget)) for c in combinations}
    least, most = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
    if sizes[least] != sizes[most]:
        names = [", ".join(map(str, labels)) for labels in (least, most)]
        raise ConfigError(
            f"tune.budget={'null' if tuning.budget is None else tuning.budget}: {names[0]} would"
            f" have {sizes[least]} of the trials, and {names[1]} {sizes[most]}; tune.budget="
            f"{sizes[least]} gives all of them the same number, or tune.own more values for the"
            " first"
        )


def best(scores: Mapping[str, Sequence[float | None]]) -> tuple[str, float] | None:
    """The name of the best trial, and its mean validation score; None if none has ended well.

    Args:
        scores: name of a trial -> its validation scores, one for each seed; None and NaN for a
            run that is missing or has diverged, with which a trial cannot win. Of equal trials the
            first wins.
    """
    means: dict[str, float] = {
        name: float(mean(values))  # type: ignore[type-var, arg-type]
        for name, values in scores.items()
        if values and all(value is not None and math.isfinite(value) for value in values)
    }
    return max(means.items(), key=operator.itemgetter(1), default=None)


def at_the_edge(point: Point, space: Space) -> list[str]:
    """The settings of which an outermost value was chosen: a better one may lie beyond it.

    Of fewer than three values each is an outermost one, which tells nothing.
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


# ---- what is tuned, as the file of an experiment says it
def read_tuning(
    declared: Mapping[str, Any],
    axes: Mapping[str, Sequence[Value]],
    settings: Mapping[str, Override],
    of_file: Mapping[str, Sequence[Value]],
    seed: object,
) -> Tuning | None:
    """What is tuned; a setting that the command line gives is not.

    Args:
        declared: the entry `tune` of the file, with the overrides of the command line.
        axes: axis -> its values.
        settings: key -> the override of the command line, or of the scale.
        of_file: axis -> the values that it has in the file.
        seed: that of the runs to which no axis gives one.

    Raises:
        ConfigError: the entry is written wrongly, or names no value of an axis.
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
    # The command line, or the scale, may have left a value of the file out.
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
                " (tune.per), which has no such value; trials of its own would be compared with"
                " those of the others"
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
    """What the file keeps of earlier trials, in the order of the axes."""
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
        if place not in wanted:  # the command line, or the scale, has left it out
            continue
        space = tuning.space_of([label for _, label in place])
        for key in sorted({*space, *point}.difference(settings)):
            one_of(name, key, space)
            if key not in point or not _within(point[key], space[key]):
                raise ConfigError(f"{name}: {key}={point.get(key)} is none of the values to try")
        if place in chosen:
            raise ConfigError(f"{name}: there are two choices for {_text(place)}")
        chosen[place] = {key: point[key] for key in space}
    if missing := [place for place in wanted if place not in chosen]:
        raise ConfigError(
            f"tune.chosen: there is no choice for {_text(missing[0])}; tune.chosen=null makes the"
            " trials again"
        )
    return chosen


def _text(place: Setting) -> str:
    return ", ".join(f"{axis}={label}" for axis, label in place)


def _within(value: object, values: tuple[Any, ...] | Interval) -> bool:
    if isinstance(values, Interval):
        return isinstance(value, (int, float)) and values.low <= value <= values.high
    return value in values


def _range(name: str, key: str, declared: object) -> tuple[Label | list[Any], ...] | Interval:
    """The values of a setting that is tuned, or an interval of them."""
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
            f"tune.seeds={list(seeds)}: seed {min(both)} is also among those of the runs, whose"
            " results the tuning may not see"
        )
