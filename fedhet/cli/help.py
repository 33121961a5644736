"""The texts of --help and --list, made from conf/ and from the code; plain text, so that they read
well in a pipe."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from fedhet.config import catalogue

USAGE = """\
fedhet: federated training when the clients' data differ

usage
  python -m fedhet [group=choice ...] [setting=value ...]    one run; without arguments that of the defaults
  python -m fedhet -m ... seed=0,1,2                         a sweep: every combination of the values with commas
  flwr run . --run-config "overrides='...'"                  the same through Flower, here or on many machines

options
  -m, --multirun     sweep
  --list             the methods, the plug-ins, and which of them compose
  --cfg job          print the configuration and run nothing
  --version, -h, --help
"""
EXAMPLES = """\
examples
  python -m fedhet method=scaffold 'plugin=[fednorm]' dataset=mnist
  python -m fedhet -m method=fedavg,fednorm partition.alpha=0.1,1 'seed=range(0,3)'
  flwr run . --run-config "overrides='method=scaffold plugin=[fednorm] dataset=mnist'"

Settings of a method, plug-in or server optimiser: method.<option>, plugin.<name>.<option>, server_opt.<option>; see conf/.
Results: outputs/<date>/<time>-<method>, or the folder in hydra.run.dir=<folder>; sweeps in multirun/."""
# Whose settings --help shows, with the group's default choice.
SHOWN = ("client", "partition", "engine")


def help_text() -> str:
    """What --help prints: usage, groups with their choices, the main settings with their defaults,
    examples."""
    default = catalogue.defaults()
    groups = [
        (
            group,
            " ".join(
                f"*{name}" if name == default[group] else name for name in catalogue.choices(group)
            ),
        )
        for group in default
    ]
    settings = [(f"{each.key}={each.value}", each.help) for each in catalogue.settings("config")]
    for group in SHOWN:
        settings += [
            (f"{group}.{each.key}={each.value}", each.help)
            for each in catalogue.settings(f"{group}/{default[group]}")
        ]
    tables = [
        "groups (* = default)",
        _columns(groups),
        "",
        "settings with their defaults",
        _columns(settings),
    ]
    return "\n".join([USAGE, *tables, "", EXAMPLES])


def list_text(rows: Sequence[tuple[str, str, str | None]]) -> str:
    """What --list prints, from (method, plug-in, why they do not compose or None)."""
    methods, plugins = (
        [(name, catalogue.title(group, name)) for name in catalogue.choices(group)]
        for group in ("method", "plugin")
    )
    refused = {(method, plugin): reason for method, plugin, reason in rows if reason is not None}
    names = list(dict.fromkeys(plugin for _, plugin, _ in rows))
    table = [
        (
            method,
            "  ".join(
                ("-" if (method, plugin) in refused else "+").ljust(len(plugin)) for plugin in names
            ),
        )
        for method in dict.fromkeys(method for method, _, _ in rows)
    ]
    parts = [
        "methods: method=<name>",
        _columns(methods),
        "",
        "plug-ins: plugin=[<name>,...]",
        _columns(plugins),
    ]
    parts += ["", "which compose: + yes, - refused", _columns([("", "  ".join(names)), *table])]
    parts += ["", "methods do not compose with each other", _columns([("", catalogue.ONE_METHOD)])]
    if refused:
        parts += [
            "",
            "refused",
            _columns(
                [(f"{method} + {plugin}", reason) for (method, plugin), reason in refused.items()]
            ),
        ]
    return "\n".join(parts)


def _columns(rows: Sequence[tuple[str, str]]) -> str:
    """Two columns, the second folded at 118 characters."""
    indent = max(len(name) for name, _ in rows) + 4
    return "\n".join(
        textwrap.fill(
            f"  {name}".ljust(indent) + text,
            118,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name, text in rows
    )
