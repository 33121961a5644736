"""The overrides `key=value` of a command line: read, checked against conf/ and, for sweeps, spread
out into single runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException
from omegaconf import OmegaConf

from fedhet.check import did_you_mean
from fedhet.config import catalogue
from fedhet.errors import ConfigError


def parse(lines: Sequence[str]) -> list[Override]:
    """The overrides in their order, a leading + dropped: only known keys may be given, so to add is
    to set.

    Raises:
        ConfigError: a text is no override, or names an unknown choice of a group.
    """
    if isinstance(lines, str):
        raise ConfigError(f"the overrides are a list of texts, not one text: write [{lines!r}]")
    parsed, groups = [_read(line) for line in lines], catalogue.groups()
    for override in parsed:
        if override.key_or_group in groups:
            for line in spread(override):
                _check_choice(_read(line))
    return parsed


def single(parsed: Sequence[Override]) -> list[str]:
    """The overrides as texts for one run.

    Raises:
        ConfigError: one is a sweep.
    """
    for override in parsed:
        if override.is_sweep_override():
            raise ConfigError(
                f"{override.input_line!r} gives several values: add -m to run each of them, "
                "or write key=[a,b] for a list and key='a,b' for one text"
            )
    return [str(override.input_line) for override in parsed]


def spread(override: Override) -> list[str]:
    """A sweep as one text for each value, of a range or an interval its two ends only; another
    override as it is."""
    sweep = override.value()
    if not override.is_sweep_override():
        return [str(override.input_line)]
    if isinstance(sweep, IntervalSweep):
        values = [str(sweep.start), str(sweep.end)]
    elif isinstance(sweep, Glob):
        values = sweep.filter(list(catalogue.choices(override.key_or_group)))
    else:
        values = list(override.sweep_string_iterator())
        values = values[:: max(1, len(values) - 1)] if isinstance(sweep, RangeSweep) else values
    if not values:
        raise ConfigError(f"{override.input_line!r} has no value to run")
    return [f"{override.key_or_group}={value}" for value in values]


def runs_of_sweep(parsed: Sequence[Override]) -> Iterator[list[str]]:
    """Single runs that use every combination of the groups' choices, and every other value once.

    That is enough to check names and ranges, for which no two settings depend on each other; it
    keeps long sweeps quick to check."""
    values = [spread(override) for override in parsed]
    groups = catalogue.groups()
    combined = [
        each if override.key_or_group in groups else each[:1]
        for override, each in zip(parsed, values, strict=True)
    ]
    yield from map(list, itertools.product(*combined))
    for position, each in enumerate(values):
        for line in each[len(combined[position]) :]:
            yield [line if place == position else other[0] for place, other in enumerate(values)]


def choices_only(parsed: Sequence[Override]) -> list[str]:
    """The overrides that choose from a group."""
    groups = catalogue.groups()
    chosen = [
        override
        for override in parsed
        if override.key_or_group in groups and not isinstance(override.value(), dict)
    ]
    return [str(override.input_line) for override in chosen]


def check_keys(parsed: Sequence[Override], settings: Mapping[str, Any]) -> None:
    """Refuse keys that are not in `settings`, the configuration that the chosen groups make.

    Raises:
        ConfigError: naming the nearest keys, and those allowed at that level.
    """
    for override in parsed:
        if override.key_or_group != "experiment" and not override.is_hydra_override():
            for key in _leaves(override.value(), override.key_or_group):
                _check_key(key, settings)


def _read(line: str) -> Override:
    if not line.startswith(("+hydra", "++hydra")):
        line = line.lstrip("+")
    try:
        override = OverridesParser.create().parse_override(line)
    except HydraException as error:
        raise ConfigError(_unreadable(line, error)) from None
    if not override.key_or_group:
        raise ConfigError(f"cannot read {line!r}: no key before the =")
    if override.is_delete():
        raise ConfigError(
            f"{line!r}: a setting cannot be deleted; give it another value, such as plugin=[] or"
            " server_opt=none"
        )
    if override.package is not None:
        raise ConfigError(
            f"{line!r}: a choice has its fixed place; write {override.key_or_group}=... without"
            f" @{override.package}"
        )
    return override


def _unreadable(line: str, error: Exception) -> str:
    if "=" not in line:
        known = [
            f"{group}={line}" for group, choices in catalogue.groups().items() if line in choices
        ]
        return f"cannot read {line!r}: write key=value{did_you_mean(line, (), known)}"
    start = getattr(error.__cause__, "startIndex", None)
    reason = str(error).splitlines()[0] if start is None else f"unexpected {line[start:]!r}"
    return (
        f"cannot read {line!r}: {reason}; text with special characters is quoted twice, as in"
        " \"key='a, b'\""
    )


def _check_choice(override: Override) -> None:
    group, value = override.key_or_group, override.value()
    choices = catalogue.choices(group)
    if isinstance(value, dict):
        return  # settings, not a choice
    if isinstance(value, list) and group != "plugin":
        raise ConfigError(
            f"{override.input_line!r}: {group} takes one choice, not a list; choose from:"
            f" {', '.join(choices)}"
        )
    if value is None and group in catalogue.defaults() and catalogue.defaults()[group] is None:
        return  # as in config.yaml
    for name in value if isinstance(value, list) else [value]:
        if group == "plugin" and name not in choices and name in catalogue.choices("method"):
            raise ConfigError(
                f"unknown plugin '{name}': it is a method, and {catalogue.ONE_METHOD}; choose from:"
                f" {', '.join(choices)}"
            )
        if name not in choices and not _named(group, str(name)):
            shown = "null" if name is None else name
            raise ConfigError(
                f"unknown {group} '{shown}'{did_you_mean(str(name), choices)}; choose from:"
                f" {', '.join(choices)}"
            )


def _named(group: str, choice: str) -> bool:
    """Whether the choice is `torchvision/<name>`: `torchvision` with its setting `name`. Hydra then
    finds it as if it had a file."""
    family, _, name = choice.partition("/")
    if not name or "/" in name or family not in catalogue.choices(group):
        return False
    settings = OmegaConf.load(catalogue.CONF / group / f"{family}.yaml")
    if not OmegaConf.is_missing(settings, "name"):
        return False
    OmegaConf.update(settings, "name", name)
    ConfigStore.instance().store(name, settings, group=f"{group}/{family}", package=group)
    return True


def _check_key(key: str, settings: Mapping[str, Any]) -> None:
    level: Any = settings
    parts = key.split(".")
    for depth, part in enumerate(parts):
        if isinstance(level, Mapping) and part in level:
            level = level[part]
        elif isinstance(level, list) and part.isdigit() and int(part) < len(level):
            level = level[int(part)]
        else:
            raise ConfigError(_unknown(key, ".".join(parts[:depth]), level, settings))


def _unknown(key: str, above: str, level: Any, settings: Mapping[str, Any]) -> str:
    if above == "plugin":
        name, plugins = key.split(".")[1], catalogue.choices("plugin")
        if name in plugins:
            return f"{key!r}: the plug-in {name} is not in this run; add plugin=[{name}]"
        return (
            f"{key!r}: unknown plug-in{did_you_mean(name, plugins)}; choose from:"
            f" {', '.join(plugins)}"
        )
    top = list(dict.fromkeys([*catalogue.groups(), *settings]))
    leaves = [leaf for leaf in _leaves(settings) if not leaf.endswith("_target_")]
    namesakes = [leaf for leaf in leaves if leaf.rpartition(".")[2] == key.rpartition(".")[2]]
    message = (
        "unknown setting"
        f" {key!r}{did_you_mean(key, leaves if above else [*top, *leaves], namesakes)};"
        f" {above or 'the top level'}"
    )
    if not isinstance(level, Mapping):
        return f"{message} has nothing below it"
    allowed = [name for name in level if name != "_target_"] if above else top
    return f"{message} has {', '.join(allowed) or 'no settings in this run'}"


def _leaves(value: Any, key: str = "") -> Iterator[str]:
    """The dotted keys of a nested mapping's values; an empty mapping is a value."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key
