"""What is tuned before the runs, as the file of an experiment says it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override

from fedhet.config import overrides
from fedhet.core.check import did_you_mean, each, integer, one_of, optional
from fedhet.core.errors import ConfigError
from fedhet.experiment.axes import SEED, Label, Value, mapping, single_values
from fedhet.experiment.tuning import Interval, Space, Tuning


def read_tuning(
    declared: Mapping[str, Any],
    axes: Mapping[str, Sequence[Value]],
    settings: Mapping[str, Override],
    declared_labels: Mapping[str, Collection[str]],
    seed: object,
) -> Tuning | None:
    """What is tuned; a setting that the command line gives is not.

    Args:
        declared: the entry `tune` of the file, with the overrides of the command line.
        axes: axis -> its values.
        settings: key -> the override of the command line, or of the scale.
        declared_labels: axis -> the names that the file gives its values.
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
    left_out = {name for names in declared_labels.values() for name in names}.difference(labels)
    for label, values in mapping("tune.own", declared["own"]).items():
        if label not in labels and label not in left_out:
            raise ConfigError(
                f"tune.own.{label}: no axis has this value{did_you_mean(label, labels)}"
            )
        if label in labels:
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
    return Tuning(budget, seeds, shared, own, tuple(per))


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
