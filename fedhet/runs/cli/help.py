"""The texts of --help, --help group=choice ... and --list, made from conf/ and from the code.

They are plain text, which stays readable in a pipe.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import yaml

from fedhet.core.check import did_you_mean
from fedhet.core.errors import ConfigError
from fedhet.runs import process
from fedhet.runs.config import catalogue
from fedhet.runs.config.lines import key_of

Choice = tuple[str, str]  # (group, its choice), such as ("method", "scaffold")
TOP = ("", "config")  # the settings without a group
WIDTH = 100
PRESET_WIDTH = 80  # of a line, so that "set by it" fits next to it
USAGE = """\
fedhet: federated learning on non-IID clients

usage
  python -m fedhet [group=choice ...] [setting=value ...]   one run; without arguments, the defaults
  python -m fedhet -m ... seed=0,1,2                        a sweep over all combinations of values
  python -m fedhet resume=<run folder> [rounds=...]         continue a run that was stopped
  python -m fedhet <command> ...                            a command; <command> --help explains it
  flwr run . --run-config "overrides='...'"                 a run through Flower, on any machines

options
  -m, --multirun     run a sweep
  --list             list the methods and the plug-ins, and which of them can be combined
  --config-dir DIR   also choose from DIR/method, DIR/plugin, ...: components of your own
  --dry-run          print how many runs an experiment has and how long they take; run none
  --cfg job          print the configuration and run nothing
  --version
  -h, --help         print this text
  --help <names>     the options of groups and choices, with their ranges:
                     --help method=scaffold plugin=[fednorm], --help model=cnn, --help dataset
"""
EXAMPLES = """\
examples
  python -m fedhet method=scaffold 'plugin=[fednorm]' dataset=mnist
  python -m fedhet -m method=fedavg,fednorm partition.alpha=0.1,1 'seed=range(0,3)'
  flwr run . --run-config "overrides='method=scaffold plugin=[fednorm] dataset=mnist'"

Methods, plug-ins, server optimisers and merges have settings, too: method.<option>,
plugin.<name>.<option>, server_opt.<option>, merge.<option>. See --help method=<name> and so on.
Results are in outputs/<date>/<time>-<method>, or in the folder given by hydra.run.dir=<folder>. The
results of a sweep are in multirun/."""
# --help shows the settings of these groups, with the values of the group's default choice.
SHOWN_GROUPS = ("client", "partition", "engine")
# The results of `refusal` for fedhet's own components, so that `--list` need not build each pair.
# `make docs` writes the file; a test builds every pair and compares.
KNOWN = catalogue.CONF / "combinations.yaml"


def columns(rows: Sequence[tuple[str, str]]) -> str:
    """Return a table of two columns; the second is wrapped at WIDTH."""
    indent = max(len(name) for name, _ in rows) + 4
    return "\n".join(
        wrapped(f"  {name}".ljust(indent) + text, following=" " * indent) for name, text in rows
    )


def wrapped(text: str, first: str = "", following: str = "  ") -> str:
    """Return the text wrapped at WIDTH; a bound such as ">= 1" stays in one line.

    Args:
        text: the text.
        first: the beginning of the first line.
        following: the beginning of the following lines.
    """
    return textwrap.fill(
        first + re.sub(r"([<>]=?) ", "\\1\0", text),
        WIDTH,
        subsequent_indent=following,
        break_long_words=False,
        break_on_hyphens=False,
    ).replace("\0", " ")


def help_text(commands: Mapping[str, tuple[str, str]]) -> str:
    """Return the text of --help.

    It has the usage, `commands`, the groups with their choices, the main settings with their
    defaults, and examples.
    """
    default = catalogue.defaults()
    groups = [
        (group, " ".join(f"{'*' * (name == chosen)}{name}" for name in catalogue.shown(group)))
        for group, chosen in default.items()
    ]
    shown = {"": "config"} | {f"{group}.": f"{group}/{default[group]}" for group in SHOWN_GROUPS}
    parts = [
        USAGE,
        "commands",
        columns([(name, text) for name, (_, text) in commands.items()]),
        "",
        "groups (* = default)",
        columns(groups),
        "",
        "settings with their defaults",
        columns([row for prefix, path in shown.items() for row in _rows(path, prefix)]),
        "",
        EXAMPLES,
    ]
    return "\n".join(parts)


def options_text(words: Sequence[str]) -> str:
    """Return the options of components: names, defaults, ranges and help.

    Args:
        words: each names a choice (method=scaffold, plugin=[fednorm,moon]), a group (dataset), or
            a setting (client.lr=.1, rounds). For a setting, all settings of its group are shown.

    Raises:
        ConfigError: a word names nothing; the message suggests the closest names.
    """
    chosen = dict(component for word in words for component in _chosen(word) if component[1])
    named = dict.fromkeys(component for word in words for component in _components(word, chosen))
    sections: dict[Choice, str] = {}

    def add(component: Choice, origin: str = "") -> None:
        """Add the options of a component, and of those it brings unless the words replace them."""
        sections[component] = (
            _section(component, origin) if component[1] else _choices_text(component[0])
        )
        for other in catalogue.brought(*component) if all(component) else ():
            known = [*named, *sections]
            if other not in known and (other[0] == "plugin" or other[0] not in dict(known)):
                add(other, f" (part of {_written(component)})")

    for component in named:
        add(component)
    return "\n\n".join(sections.values())


def _components(word: str, chosen: dict[str, str]) -> list[Choice]:
    """Return the components that a word names; a group without a choice is (group, "")."""
    if choices := _chosen(word):
        return choices
    key = key_of(word)
    head, _, rest = key.partition(".")
    if head == "plugin" and rest:
        return _chosen(f"plugin={rest.partition('.')[0]}")
    if head in catalogue.groups():
        default = catalogue.defaults().get(head)
        return [(head, chosen.get(head) or (default if isinstance(default, str) else ""))]
    top = [setting.key for setting in catalogue.settings("config")]
    if any(name == key or name.startswith(f"{key}.") for name in top):
        return [TOP]
    groups = catalogue.groups()
    certain = [*catalogue.overrides_of_choice(word), *_settings_named(key)]
    hint = did_you_mean(key, [*groups, *top], certain)
    raise ConfigError(
        f"--help {word}: no group and no setting has this name{hint}; groups:"
        f" {', '.join(groups)}; for example: --help method=scaffold"
    )


def _settings_named(key: str) -> list[str]:
    """Return the settings of the default choices with this last name: `client.lr` for `lr`."""
    defaults = [pair for pair in catalogue.defaults().items() if isinstance(pair[1], str)]
    return [
        f"{group}.{key}"
        for group, choice in defaults
        if any(setting.key == key for setting in catalogue.settings(f"{group}/{choice}"))
    ]


def _chosen(word: str) -> list[Choice]:
    """Return the (group, choice) of `group=choice`, of a list of them, or of a group alone."""
    key, equals, value = word.partition("=")
    group = key.lstrip("+")
    groups = catalogue.groups()
    if group not in groups:
        return []
    if not equals:
        return [(group, "")]
    names = [name.strip() for name in value.strip("[]").split(",") if name.strip()]
    for name in names:
        family = name.partition("/")[0] if group == "model" else name  # of torchvision/<name>
        if family not in groups[group]:
            similar = did_you_mean(name, groups[group])
            raise ConfigError(
                f"--help {word}: unknown {group} {name!r}{similar}; choose from:"
                f" {', '.join(catalogue.shown(group))}"
            )
    return [(group, name) for name in names] or [(group, "")]


def _section(component: Choice, origin: str) -> str:
    """Return the options of a component; `origin` names the component that it is part of."""
    group, choice = component
    path = "/".join(filter(None, component))
    prefix = {"plugin": f"plugin.{choice}.", "": ""}.get(group, f"{group}.")
    title = catalogue.title(*component) if group else ""
    presets = [" ".join(f"{one.key}={one.value}".split()) for one in catalogue.presets(path)]
    short = [
        line if len(line) <= PRESET_WIDTH else f"{line[: PRESET_WIDTH - 3]}..." for line in presets
    ]
    rows = [*_rows(path, prefix), *((line, "set by it") for line in short)]
    parts = [
        wrapped(f"{_written(component)}{origin}" + (f": {title}" if title else "")),
        *(wrapped(remark, "  ") for remark in catalogue.remarks(path)),
        columns(rows) if rows else "  It has no options.",
    ]
    return "\n".join(parts)


def _choices_text(group: str) -> str:
    default = catalogue.defaults().get(group)
    rows = [
        (f"{'*' if name == default else ' '}{name}", catalogue.title(group, name))
        for name in catalogue.shown(group)
    ]
    return f"{group}=<name> (* = default)\n{columns(rows)}"


def _rows(path: str, prefix: str) -> Iterator[tuple[str, str]]:
    for setting in catalogue.settings(path):
        value = setting.value.replace(", ", ",")
        required = value == "???"
        yield (
            f"{prefix}{setting.key}={'' if required else value}",
            (f"required: {setting.help}" if required else setting.help),
        )
        if setting.note:
            yield "", setting.note


def _written(component: Choice) -> str:
    group, choice = component
    if component == TOP:
        return "settings without a group"
    return f"plugin=[{choice}]" if group == "plugin" else f"{group}={choice}"


def components_text() -> str:
    """Return the first part of --list: the methods and the plug-ins."""
    return "\n".join(
        f"{head}\n{columns([(name, catalogue.title(group, name)) for name in names])}\n"
        for group, head, names in (
            ("method", "methods: method=<name>", catalogue.choices("method")),
            ("plugin", "plug-ins: plugin=[<name>,...]", catalogue.choices("plugin")),
        )
    )


def combinations_text(rows: Sequence[tuple[str, str, str | None]]) -> str:
    """Return the second part of --list: which methods and plug-ins can be combined.

    Args:
        rows: (method, plug-in, reason why they cannot be combined, or None).
    """
    refused = [(f"{method} + {plugin}", reason) for method, plugin, reason in rows if reason]
    parts = [
        "combinations: + possible, - refused, = the method's own",
        columns(_matrix(rows)),
        "",
        "methods cannot be combined with each other",
        columns([("", catalogue.ONE_METHOD)]),
    ]
    if refused:
        parts += ["", "refused", columns(refused)]
    return "\n".join(parts)


def _matrix(rows: Sequence[tuple[str, str, str | None]]) -> list[tuple[str, str]]:
    """Return a line for each method, with a mark below the name of each plug-in."""
    methods = list(dict.fromkeys(method for method, _, _ in rows))
    plugins = list(dict.fromkeys(plugin for _, plugin, _ in rows))
    refused = {(method, plugin) for method, plugin, reason in rows if reason is not None}
    own = {(method, name) for method in methods for _, name in catalogue.brought("method", method)}
    lines = [("", "  ".join(plugins))]
    for method in methods:
        pairs = [(method, plugin) for plugin in plugins]
        marks = ["-" if pair in refused else "=" if pair in own else "+" for pair in pairs]
        padded = (mark.ljust(len(name)) for mark, name in zip(marks, plugins, strict=True))
        lines.append((method, "  ".join(padded)))
    return lines


# ---- which plug-ins can be combined with which methods
def compatibility() -> list[tuple[str, str, str | None]]:
    """Return (method, plug-in, reason why they cannot be combined, or None) for every pair."""
    known = yaml.safe_load(KNOWN.read_text(encoding="utf-8"))
    every = product(catalogue.built_in("method"), catalogue.built_in("plugin"))
    ours = {(method, plugin) for method, plugin in every if plugin in known.get(method, {})}
    pairs = list(product(catalogue.choices("method"), catalogue.choices("plugin")))
    if not ours.issuperset(pairs):
        print("building your own components, to see which can be combined ...", file=sys.stderr)
    return [(m, p, known[m][p] if (m, p) in ours else refusal(m, p)) for m, p in pairs]


def refusal(method: str, plugin: str) -> str | None:
    """Return why the two cannot be combined, or None if they can.

    They are built on a toy task, so the code itself gives the answer. A user's component that
    cannot be built with its defaults is refused with every other; the reason says why.
    """
    with process.imports():
        from fedhet.runs import config
        from fedhet.runs.job import try_settings

    try:
        try_settings(config.compose([f"method={method}", f"plugin=[{plugin}]"]))
    except ConfigError as error:
        return str(error)
    return None
