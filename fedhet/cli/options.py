"""The text of `--help group=choice ...`: the options of the chosen pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedhet.cli.columns import columns, wrapped
from fedhet.config import catalogue
from fedhet.config.catalogue import YamlSetting
from fedhet.config.lines import key_of
from fedhet.core.check import did_you_mean
from fedhet.core.errors import ConfigError

Choice = tuple[str, str]  # (group, its choice), such as ("method", "scaffold")
TOP = ("", "config")  # the settings without a group
PRESET_WIDTH = 80  # of a line, beside which "set by it" has room


def options_text(words: Sequence[str]) -> str:
    """Return the options of pieces: names, defaults, ranges and help.

    Args:
        words: what the pieces are named by: a choice (method=scaffold, plugin=[fednorm,moon]), a
            group (dataset), or a setting (client.lr=.1, rounds), which shows the others of its
            group too.

    Raises:
        ConfigError: a word names nothing; the message suggests the closest names.
    """
    chosen = dict(piece for word in words for piece in _chosen(word) if piece[1])
    named = dict.fromkeys(piece for word in words for piece in _pieces(word, chosen))
    sections: dict[Choice, str] = {}

    def add(piece: Choice, origin: str = "") -> None:
        """Add the options of a piece, and of what it brings unless the words name another one."""
        sections[piece] = _section(piece, origin) if piece[1] else _choices_text(piece[0])
        for other in catalogue.brought(*_file(piece)) if all(piece) else ():
            known = [*named, *sections]
            if other not in known and (other[0] == "plugin" or other[0] not in dict(known)):
                add(other, f" (part of {_written(piece)})")

    for piece in named:
        add(piece)
    return "\n\n".join(sections.values())


def _pieces(word: str, chosen: dict[str, str]) -> list[Choice]:
    """Return what a word names; a group without a choice is (group, "")."""
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
    """Return the settings of the groups' defaults that have this last name: lr is client.lr."""
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
        if _file((group, name))[1] not in groups[group]:
            similar = did_you_mean(name, groups[group])
            raise ConfigError(
                f"--help {word}: unknown {group} {name!r}{similar}; choose from:"
                f" {', '.join(groups[group])}"
            )
    return [(group, name) for name in names] or [(group, "")]


def _file(piece: Choice) -> Choice:
    """Return the choice that has a file: that of model=torchvision/<name> is torchvision."""
    group, choice = piece
    return (group, choice.partition("/")[0]) if group == "model" else piece


def _section(piece: Choice, origin: str) -> str:
    """Return the options of a piece; `origin` says what it is part of."""
    group, choice = piece
    if piece == TOP:
        return f"{_written(piece)}\n{columns(list(_rows(catalogue.settings(choice), '')))}"
    path = "/".join(_file(piece))
    prefix = f"plugin.{choice}." if group == "plugin" else f"{group}."
    title = catalogue.title(*_file(piece))
    rows = [
        *_rows(catalogue.settings(path), prefix),
        *((_short(preset), "set by it") for preset in catalogue.presets(path)),
    ]
    parts = [
        wrapped(f"{_written(piece)}{origin}" + (f": {title}" if title else "")),
        *(wrapped(remark, "  ") for remark in catalogue.remarks(path)),
        columns(rows) if rows else "  It has no options.",
    ]
    return "\n".join(parts)


def _short(preset: YamlSetting) -> str:
    """The setting on one line, of which the other column leaves so much."""
    line = " ".join(f"{preset.key}={preset.value}".split())
    return line if len(line) <= PRESET_WIDTH else f"{line[: PRESET_WIDTH - 3]}..."


def _rows(settings: Sequence[YamlSetting], prefix: str) -> Iterator[tuple[str, str]]:
    for setting in settings:
        value = setting.value.replace(", ", ",")
        required = value == "???"
        yield (
            f"{prefix}{setting.key}={'' if required else value}",
            (f"required: {setting.help}" if required else setting.help),
        )
        if setting.note:
            yield "", setting.note


def _choices_text(group: str) -> str:
    default = catalogue.defaults().get(group)
    rows = [
        (f"{'*' if name == default else ' '}{name}", catalogue.title(group, name))
        for name in catalogue.choices(group)
    ]
    return f"{group}=<name> (* = default)\n{columns(rows)}"


def _written(piece: Choice) -> str:
    group, choice = piece
    if piece == TOP:
        return "settings without a group"
    return f"plugin=[{choice}]" if group == "plugin" else f"{group}={choice}"
