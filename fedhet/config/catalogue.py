"""What the folder conf/ offers: groups, choices, settings and their help.

It is read without Hydra, so that the help text appears at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import OmegaConf

_PACKAGE = Path(__file__).resolve().parents[1]


def _conf_folder() -> Path:
    """Return conf/: inside the package if installed from a wheel, else beside it."""
    inside = _PACKAGE / "conf"
    return inside if inside.is_dir() else _PACKAGE.parent / "conf"


CONF: Path = _conf_folder()

# Why a method is not a plug-in.
ONE_METHOD = (
    "a run has exactly one method, which owns the aggregation; fedsa, for example, cannot be"
    " combined with fednova or scaffold, whose server steps need the mean of the changes under"
    " known weights, which fedsa replaces"
)

_GLOBAL = "# @package _global_"
_HYDRAS_OWN = ("_target_", "defaults", "hydra")


class YamlSetting(NamedTuple):
    """A setting of a YAML file.

    Attributes:
        key: its name, dotted inside a block.
        value: its value as text, as in the file.
        help: the comment behind it, or else the one above it; "" if there is neither.
        note: the comment above it where there is also one behind it.
    """

    key: str
    value: str
    help: str
    note: str


def groups() -> dict[str, tuple[str, ...]]:
    """Return group -> its choices."""
    folders = sorted(path for path in CONF.iterdir() if path.is_dir())
    return {folder.name: choices(folder.name) for folder in folders}


def choices(group: str) -> tuple[str, ...]:
    """Return the choices of a group in alphabetical order; one in a subfolder is `folder/name`."""
    folder = CONF / group
    paths = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.yaml"))
    return tuple(sorted(path.as_posix() for path in paths))


def overrides_of_choice(choice: str) -> list[str]:
    """Return `group=choice` for every group that has this choice."""
    return [f"{group}={choice}" for group, names in groups().items() if choice in names]


def defaults() -> dict[str, str | list[str] | None]:
    """Return group -> the choice in config.yaml: a name, a list of names, or None for no choice."""
    entries = _load(CONF / "config.yaml")["defaults"]
    pairs = [pair for entry in entries if isinstance(entry, dict) for pair in entry.items()]
    return {group: choice for group, choice in pairs if not group.startswith("override ")}


def fixed_choices(group: str, choice: str) -> dict[str, str]:
    """Return the choices of other groups that define this one.

    For the method fedadam that is {"server_opt": "fedadam"}.
    """
    entries = _load(CONF / group / f"{choice}.yaml").get("defaults", [])
    pairs = [pair for entry in entries if isinstance(entry, dict) for pair in entry.items()]
    return {
        key.removeprefix("override /").partition("@")[0]: value
        for key, value in pairs
        if key.startswith("override /")
    }


def title(group: str, choice: str) -> str:
    """Return the first comment of the choice's file, without the `# @package` line; "" if none."""
    for line in (CONF / group / f"{choice}.yaml").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            return line.removeprefix("#").strip()
    return ""


def brought(group: str, choice: str) -> list[tuple[str, str]]:
    """Return the (group, choice) that come with this choice: a method's plug-in, for example."""
    entries = _load(CONF / group / f"{choice}.yaml").get("defaults", [])
    plugins = [
        ("plugin", str(entry).removeprefix("/plugin/"))
        for entry in entries
        if str(entry).startswith("/plugin/")
    ]
    chosen = [
        (other, str(name))
        for other, names in fixed_choices(group, choice).items()
        for name in (names if isinstance(names, list) else [names])
    ]
    return [*plugins, *chosen]


def settings(path: str) -> list[YamlSetting]:
    """Return the settings of `<path>.yaml`; keys inside a block are dotted: `eval.every`.

    Left out are what Hydra alone reads, the name that equals the file's, and in a file that is
    `@package _global_` everything: see `presets`.
    """
    text = (CONF / f"{path}.yaml").read_text(encoding="utf-8")
    return [] if _GLOBAL in text else _leaves(text, path.rpartition("/")[2])


def presets(path: str) -> list[YamlSetting]:
    """Return what a file that is `@package _global_` sets, such as an experiment, by full keys."""
    text = (CONF / f"{path}.yaml").read_text(encoding="utf-8")
    return _leaves(text, "") if _GLOBAL in text else []


def remarks(path: str) -> list[str]:
    """Return the comments of `<path>.yaml` that belong to no key: a blank line follows them."""
    return _comments((CONF / f"{path}.yaml").read_text(encoding="utf-8"))[1]


def _leaves(text: str, name: str) -> list[YamlSetting]:
    lines = text.splitlines()
    above, _ = _comments(text)

    def below(node: yaml.MappingNode, prefix: str) -> Iterator[YamlSetting]:
        for key, value in node.value:
            dotted = f"{prefix}{key.value}"
            if key.value in _HYDRAS_OWN or (dotted == "name" and value.value == name):
                continue
            if isinstance(value, yaml.MappingNode):
                yield from below(value, f"{dotted}.")
                continue
            behind = lines[value.end_mark.line][value.end_mark.column :].strip().lstrip("# ")
            helps = [text for text in (behind, above.get(key.start_mark.line, "")) if text]
            written = text[value.start_mark.index : value.end_mark.index]
            yield YamlSetting(dotted, written, "".join(helps[:1]), "".join(helps[1:]))

    root = yaml.compose(text, Loader=yaml.SafeLoader)
    return list(below(root, "")) if isinstance(root, yaml.MappingNode) else []


def _comments(text: str) -> tuple[dict[int, str], list[str]]:
    """Return the comments above lines, by the number of the line, and those above none.

    The title and the `# @package` line before it are neither.
    """
    above: dict[int, str] = {}
    free: list[str] = []
    block: list[str] = []
    titled = False
    for number, line in enumerate(text.splitlines()):
        words = line.strip()
        if words.startswith("#"):
            if titled:
                block.append(words.lstrip("# "))
            titled = titled or not words.startswith("# @package")
            continue
        titled = True
        if block and words:
            above[number] = " ".join(block)
        elif block:
            free.append(" ".join(block))
        block = []
    return above, free


def _load(path: Path) -> dict[str, Any]:
    content: Any = OmegaConf.to_container(OmegaConf.load(path))
    return content
