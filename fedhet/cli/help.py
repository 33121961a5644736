"""The texts of --help and --list, made from conf/ and from the code.

They are plain text, so that they stay readable in a pipe.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedhet.cli.columns import columns
from fedhet.cli.commands import commands
from fedhet.config import catalogue

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
  --config-dir DIR   also choose from DIR/method, DIR/plugin, ...: pieces of your own
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

Settings of a method, plug-in, server optimiser or merge: method.<option>, plugin.<name>.<option>,
server_opt.<option>, merge.<option>; --help method=<name> and so on print them.
Results: outputs/<date>/<time>-<method>, or the folder in hydra.run.dir=<folder>; those of a sweep
are in multirun/."""
# The groups whose settings --help shows, as the group's default choice has them.
SHOWN_GROUPS = ("client", "partition", "engine")


def help_text() -> str:
    """Return what --help prints.

    That is usage, commands, groups with their choices, the main settings with their defaults, and
    examples.
    """
    offered = [(name, command.help) for name, command in commands().items()]
    default = catalogue.defaults()
    groups = [(group, _marked(catalogue.choices(group), default[group])) for group in default]
    settings = _setting_rows("config")
    for group in SHOWN_GROUPS:
        settings += _setting_rows(f"{group}/{default[group]}", f"{group}.")
    parts = [
        USAGE,
        "commands",
        columns(offered),
        "",
        "groups (* = default)",
        columns(groups),
        "",
        "settings with their defaults",
        columns(settings),
        "",
        EXAMPLES,
    ]
    return "\n".join(parts)


def pieces_text() -> str:
    """Return what --list prints at once: the methods and the plug-ins."""
    parts = [
        "methods: method=<name>",
        columns(_titles("method")),
        "",
        "plug-ins: plugin=[<name>,...]",
        columns(_titles("plugin")),
        "",
    ]
    return "\n".join(parts)


def combinations_text(rows: Sequence[tuple[str, str, str | None]]) -> str:
    """Return the rest of what --list prints.

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


def _marked(choices: Sequence[str], default: str | list[str] | None) -> str:
    return " ".join(f"*{name}" if name == default else name for name in choices)


def _setting_rows(path: str, prefix: str = "") -> list[tuple[str, str]]:
    return [
        (f"{prefix}{setting.key}={setting.value}", setting.help)
        for setting in catalogue.settings(path)
    ]


def _titles(group: str) -> list[tuple[str, str]]:
    return [(name, catalogue.title(group, name)) for name in catalogue.choices(group)]


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
