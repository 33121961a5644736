"""The axes of an experiment, and the values on them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override

from fedhet.core.errors import ConfigError
from fedhet.runs.config import overrides
from fedhet.runs.config.experiment_file import mapping
from fedhet.runs.config.lines import key_of, value_of
from fedhet.runs.config.overrides import literal

Label = str | int | float | bool | None
Setting = tuple[tuple[str, Label], ...]  # one label for each of some axes


@dataclass(frozen=True)
class Value:
    """A value of an axis.

    Attributes:
        label: its name in tables and figures.
        overrides: the overrides that the label stands for.
    """

    label: Label
    overrides: tuple[str, ...]


def read_axes(
    declared: Mapping[str, Any], settings: Mapping[str, Override]
) -> dict[str, tuple[Value, ...]]:
    """Return the axes of the file, changed and extended by the command line.

    An override of an axis replaces its values. A sweep over another setting adds an axis.

    Args:
        declared: the entry `axes` of the file.
        settings: key -> the override of the command line, or of the scale.

    Raises:
        ConfigError: an axis has the wrong form, has no value, or has a value twice.
    """
    axes = {
        axis: tuple(_values(axis, values)) for axis, values in mapping("axes", declared).items()
    }
    for axis in [axis for axis in axes if axis in settings]:
        # If the file has the same overrides or label, its value is used, with its label.
        known = {value.overrides: value for value in axes[axis]}
        named = {str(value.label): value for value in axes[axis]}
        given = values_of(settings[axis], named)
        axes[axis] = tuple(
            known.get(value.overrides) or named.get(str(value.label), value) for value in given
        )
    added = [key for key, line in settings.items() if key not in axes and line.is_sweep_override()]
    axes |= {key: values_of(settings[key]) for key in added}
    for axis, values in axes.items():
        labels = [value.label for value in values]
        if not labels:
            raise ConfigError(f"axes.{axis} has no value")
        if twice := [label for i, label in enumerate(labels) if label in labels[:i]]:
            raise ConfigError(f"axes.{axis} has {twice[0]} twice")
    return axes


def _values(axis: str, declared: object) -> Iterator[Value]:
    """Yield the values of an axis from the file's entry."""
    if isinstance(declared, Mapping):
        for label, lines in declared.items():
            yield Value(str(label), tuple(lines_of(f"axes.{axis}.{label}", lines)))
    elif isinstance(declared, list):
        for value in declared:
            label = value if isinstance(value, Label) else json.dumps(value)
            yield Value(label, tuple(single_settings([f"{axis}={written(value)}"])))
    else:
        (override,) = overrides.parse([f"{axis}={declared}"])
        yield from values_of(override)


def labels_of(declared: Mapping[str, Any]) -> dict[str, Collection[str]]:
    """Return axis -> the labels that the experiment's file gives to its values."""
    return {
        axis: [str(label) for label in values]
        for axis, values in mapping("axes", declared).items()
        if isinstance(values, Mapping)
    }


def values_of(override: Override, labels: Collection[str] = ()) -> tuple[Value, ...]:
    """Return the values that an override gives to an axis.

    Args:
        override: the override.
        labels: labels that are allowed in place of a choice of a group.
    """
    return tuple(_values(override.key_or_group, single_values(override, labels)))


def single_values(override: Override, labels: Collection[str] = ()) -> list[Any]:
    """Return the value of an override, or all values of a sweep; arguments as in `values_of`."""
    axis = override.key_or_group
    if not override.is_sweep_override():
        return [override.value()]
    if isinstance(override.value(), IntervalSweep):
        raise ConfigError(
            f"{override.input_line!r}: an axis cannot be an interval; name each of its values"
        )
    lines = [f"{axis}={value}" for value in override.sweep_string_iterator()]
    return [line.value() for line in overrides.parse(lines, {axis: labels})]


def lines_of(name: str, value: object) -> list[str]:
    """Return a list of overrides, which the file writes as a list or as one text with blanks."""
    lines = value.split() if isinstance(value, str) else [] if value is None else value
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise ConfigError(
            f"{name}={value}: must be overrides, as a list or one text with blanks, such as"
            " `method=scaffold plugin=[fednorm]`"
        )
    return list(single_settings(lines))


def single_settings(lines: Iterable[str], but: Collection[str] = ()) -> Iterator[str]:
    """Yield the overrides, and split `client={lr: .1, epochs: 2}` into one for each setting.

    An override of `client.lr` then always has this key, in whichever form the user writes it.

    Args:
        lines: the overrides.
        but: keys whose overrides are not split.
    """
    for line in lines:
        key, value = key_of(line), value_of(line)
        section = "." not in key or (key.startswith("plugin.") and key.count(".") == 1)
        if not section or key in but or not value.lstrip().startswith("{"):
            yield line
            continue
        (override,) = overrides.parse([line])
        given = override.value()
        if isinstance(given, dict) and not override.is_hydra_override():
            inner = [f"{key}.{name}={written(setting)}" for name, setting in given.items()]
            yield from single_settings(inner, but)
        else:  # several mappings, which become an axis
            yield line


def written(value: object) -> str:
    """Return the value as an override writes it; names of choices get no quotes."""
    if isinstance(value, str) and value.replace("_", "").replace("/", "").isalnum():
        return value
    return literal(value)
