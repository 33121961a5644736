"""The overrides `key=value` of a command line: parsing, checks, and the single runs of a sweep."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import (
    Glob,
    IntervalSweep,
    Override,
    Quote,
    QuotedString,
)
from hydra.errors import HydraException

from fedhet.core.check import did_you_mean
from fedhet.core.errors import ConfigError, UnknownChoice
from fedhet.runs.config import catalogue, components
from fedhet.runs.config.lines import key_of, refuse_blanks


def parse(
    lines: Sequence[str], labels: Mapping[str, Collection[str]] | None = None
) -> list[Override]:
    """Parse the overrides in order.

    A leading + is dropped: only known keys are allowed, so to add a key is the same as to set it.

    Args:
        lines: the overrides.
        labels: group -> labels of an experiment's axis, which may stand for a choice.

    Raises:
        ConfigError: a text is not an override, names an unknown choice of a group, or changes the
            folders in which choices are searched.
    """
    if not isinstance(lines, list | tuple) or not all(isinstance(line, str) for line in lines):
        raise ConfigError(
            f"overrides must be a list of texts, such as ['method=scaffold', 'rounds=5'], not"
            f" {lines!r}"
        )
    parsed = [_parse_one(line) for line in lines]
    groups = catalogue.groups()
    for override in parsed:
        if override.key_or_group in groups:
            for choice in map(_parse_one, each_value(override)):
                if str(choice.value()) not in (labels or {}).get(override.key_or_group, ()):
                    _check_choice(choice)
        elif any(key.startswith("hydra.searchpath") for key in _leaf_keys_of(override)):
            raise ConfigError(
                f"{override.input_line!r}: a run cannot name folders of components; add a folder by"
                f" --config-dir <folder>, or by the environment variable {components.SEARCH_PATH}"
                " of each machine"
            )
    return parsed


def of_single_run(parsed: Sequence[Override]) -> list[str]:
    """Return the overrides of one run in the form that Hydra needs.

    If an override sets a `_target_`, the options next to it get a ++, because no file may have the
    options of that class.

    Raises:
        ConfigError: an override is a sweep.
    """
    for override in parsed:
        if override.is_sweep_override():
            raise ConfigError(
                f"{override.input_line!r} gives several values: add -m to make a run of each, or"
                " write key=[a,b] for a list and key='a,b' for one text"
            )
    classes = _classes(parsed)
    return [_line(str(override.input_line), classes) for override in parsed]


def _classes(parsed: Sequence[Override]) -> tuple[str, ...]:
    """Return the prefixes `<group>.` for which an override sets `_target_`.

    Keys with such a prefix are not checked here, because the class knows its own options.
    """
    keys = [override.key_or_group for override in parsed if not override.is_hydra_override()]
    return tuple(key.removesuffix("_target_") for key in keys if key.endswith("._target_"))


def _is_option(key: str, classes: tuple[str, ...]) -> bool:
    return key.startswith(classes) and not key.endswith("._target_")


def _line(line: str, classes: tuple[str, ...]) -> str:
    return f"++{line}" if _is_option(key_of(line), classes) else line


def product(parsed: Sequence[Override]) -> list[tuple[str, ...]]:
    """Return the overrides of each run of a sweep: all combinations of the values.

    Raises:
        ConfigError: an override gives an interval, which has no single values.
    """
    classes = _classes(parsed)
    values = [[_line(line, classes) for line in each_value(override)] for override in parsed]
    return list(itertools.product(*values))


def each_value(override: Override) -> list[str]:
    """Return one override for each value of a sweep; an override without a sweep is unchanged.

    Raises:
        ConfigError: the sweep has no value, or is an interval.
    """
    if not override.is_sweep_override():
        return [str(override.input_line)]
    sweep = override.value()
    if isinstance(sweep, IntervalSweep):
        raise ConfigError(
            f"{override.input_line!r}: a sweep cannot use an interval; list its values"
        )
    if isinstance(sweep, Glob):
        values = sweep.filter(list(catalogue.choices(override.key_or_group)))
    else:
        values = list(override.sweep_string_iterator())
    if not values:
        raise ConfigError(f"{override.input_line!r} has no value to run")
    return [f"{override.key_or_group}={value}" for value in values]


def choices_only(parsed: Sequence[Override]) -> list[str]:
    """Return the overrides that choose from a group."""
    groups = catalogue.groups()
    return [
        str(override.input_line)
        for override in parsed
        if override.key_or_group in groups and not isinstance(override.value(), dict)
    ]


def check_keys(parsed: Sequence[Override], settings: dict[str, Any]) -> None:
    """Refuse keys that are not in `settings`, the configuration of the chosen groups.

    Raises:
        ConfigError: a key is unknown; the message names the closest keys and the allowed ones.
    """
    classes = _classes(parsed)
    for override in parsed:
        if override.key_or_group == "experiment" or override.is_hydra_override():
            continue
        for key in _leaf_keys_of(override):
            if not _is_option(key, classes):
                _check_key(key, settings)


def _parse_one(line: str) -> Override:
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
            f"{line!r}: the package of a choice is fixed; write {override.key_or_group}=... without"
            f" @{override.package}"
        )
    return override


def _unreadable(line: str, error: Exception) -> str:
    refuse_blanks([line])
    if "=" not in line:
        hint = did_you_mean(line, (), catalogue.overrides_of_choice(line))
        return f"cannot read {line!r}: write key=value{hint}"
    start = getattr(error.__cause__, "startIndex", None)
    reason = str(error).splitlines()[0] if start is None else f"unexpected {line[start:]!r}"
    return (
        f"cannot read {line!r}: {reason}; text with special characters needs two pairs of quotes,"
        " as in \"key='a, b'\""
    )


def _check_choice(override: Override) -> None:
    group = override.key_or_group
    value = override.value()
    choices = catalogue.choices(group)
    if isinstance(value, dict):
        return  # settings, not a choice
    if isinstance(value, list) and group != "plugin":
        raise ConfigError(
            f"{override.input_line!r}: {group} takes one choice, not a list;"
            f" choose from: {', '.join(choices)}"
        )
    if value is None and catalogue.defaults().get(group, "") is None:
        return  # this group has no choice by default, so null is allowed
    names = value if isinstance(value, list) else [value]
    for name in names:
        if group == "plugin" and name not in choices and name in catalogue.choices("method"):
            raise ConfigError(
                f"unknown plugin '{name}': it is a method, and {catalogue.ONE_METHOD};"
                f" choose from: {', '.join(choices)}"
            )
        if name not in choices and not _register_named_choice(group, str(name)):
            hint = did_you_mean(str(name), choices)
            if group == "experiment" and not hint:
                hint = " (to begin with: experiment=first_look)"
            raise UnknownChoice(
                f"unknown {group} '{'null' if name is None else name}'{hint};"
                f" choose from: {', '.join(catalogue.shown(group))}"
            )


def _register_named_choice(group: str, choice: str) -> bool:
    """Register the choice `torchvision/<name>` with Hydra: `torchvision` with the setting `name`.

    Returns:
        False if the choice does not have this form.
    """
    family, _, name = choice.partition("/")
    if not name or "/" in name or family not in catalogue.choices(group):
        return False
    settings = catalogue.content(group, family)
    if settings.get("name") != "???":
        return False
    settings["name"] = name
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
            raise ConfigError(_unknown_key(key, ".".join(parts[:depth]), level, settings))


def _unknown_key(key: str, parent: str, level: Any, settings: Mapping[str, Any]) -> str:
    """Return the message that `level`, the value of `parent`, does not have the rest of `key`."""
    if parent == "plugin":
        return _unknown_plugin_key(key)
    leaves = [leaf for leaf in leaf_keys({**settings, "axes": {}}) if "_target_" not in leaf]
    last = key.rpartition(".")[2]
    by_last = {old: list(new) for old, new in catalogue.RENAMED.items()}
    for leaf in leaves:
        by_last.setdefault(leaf.rpartition(".")[2], []).append(leaf)
    words = leaves if parent else dict.fromkeys([*catalogue.groups(), *settings, *leaves])
    hint = did_you_mean(key, words, catalogue.RENAMED.get(key, by_last.get(last, [])))
    if not hint:
        similar = difflib.get_close_matches(last, by_last)
        hint = did_you_mean(key, (), [by_last[name][0] for name in similar])
    message = f"unknown setting {key!r}{hint};"
    if not parent:
        return f"{message} {catalogue.ALL_SETTINGS}"
    if not isinstance(level, Mapping):
        return f"{message} {parent} is a value and has no settings"
    allowed = [name for name in level if name != "_target_"]
    return f"{message} {parent} has {', '.join(allowed) or 'no settings in this run'}"


def _unknown_plugin_key(key: str) -> str:
    name = key.split(".")[1]
    plugins = catalogue.choices("plugin")
    if name in plugins:
        return f"{key!r}: the plug-in {name} is not in this run; add plugin=[{name}]"
    return (
        f"{key!r}: unknown plug-in{did_you_mean(name, plugins)}; choose from: {', '.join(plugins)}"
    )


def _leaf_keys_of(override: Override) -> Iterator[str]:
    return leaf_keys(override.value(), override.key_or_group)


def leaf_keys(value: Any, key: str = "") -> Iterator[str]:
    """Yield the dotted keys of a nested mapping's values; an empty mapping is a value."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from leaf_keys(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key


def literal(value: Any) -> str:
    """Return the value as text for an override of Hydra; texts may have any characters."""
    if isinstance(value, str):
        return QuotedString(value, Quote.single).with_quotes()
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(literal, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{literal(inner)}' for key, inner in value.items())}}}"
    return repr(value)
