"""What the folder conf/ offers: groups, choices, settings and their help.

It is read without Hydra, so that the help text appears at once.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

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

_SETTING_LINE = re.compile(
    r"(?P<indent> *)(?P<key>\w+):(?: +(?P<value>[^#\s][^#]*?))?(?: +# +(?P<help>.*))?"
)


class YamlSetting(NamedTuple):
    """A line `key: value  # help` of a YAML file; the value is text, as in the file."""

    key: str
    value: str
    help: str


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


def settings(path: str) -> list[YamlSetting]:
    """Return the scalar settings of `<path>.yaml` that have a help comment.

    Keys inside a block are dotted: `eval.every`.
    """
    documented: list[YamlSetting] = []
    block = ""
    for line in (CONF / f"{path}.yaml").read_text(encoding="utf-8").splitlines():
        match = _SETTING_LINE.fullmatch(line)
        if match is None:
            continue
        if not match["indent"]:
            block = "" if match["value"] else f"{match['key']}."
        depth = 2 if block else 0
        if match["value"] and match["help"] and len(match["indent"]) == depth:
            documented.append(YamlSetting(f"{block}{match['key']}", match["value"], match["help"]))
    return documented


def _load(path: Path) -> dict[str, Any]:
    content: Any = OmegaConf.to_container(OmegaConf.load(path))
    return content
