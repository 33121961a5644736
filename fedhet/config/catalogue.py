"""What the folder conf/ offers: groups, choices, settings and their help. Read without Hydra, so
that help comes at once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

_HERE = Path(__file__).resolve().parent.parent
# Beside the package in a clone and in a Flower bundle, inside it where it is installed from a
# wheel.
CONF: Path = next(
    (folder for folder in (_HERE / "conf", _HERE.parent / "conf") if folder.is_dir()),
    _HERE.parent / "conf",
)

# Why a method is no plug-in, unless it wraps any host.
ONE_METHOD = (
    "a run has one method, which owns the aggregation; fedsa with fednova or scaffold, say, cannot"
    " be: their server steps need the mean of the changes under known weights, which fedsa replaces"
)

_SETTING = re.compile(
    r"(?P<indent> *)(?P<key>\w+):(?: +(?P<value>[^#\s][^#]*?))?(?: +# +(?P<help>.*))?"
)


class Setting(NamedTuple):
    """A line `key: value  # help` of a YAML file; the value as it is written there."""

    key: str
    value: str
    help: str


def groups() -> dict[str, tuple[str, ...]]:
    """Group -> its choices."""
    return {
        folder.name: choices(folder.name) for folder in sorted(CONF.iterdir()) if folder.is_dir()
    }


def choices(group: str) -> tuple[str, ...]:
    """The choices of a group in order of name; one in a folder below is `folder/name`."""
    folder = CONF / group
    return tuple(
        sorted(
            path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml")
        )
    )


def defaults() -> dict[str, str | list[str] | None]:
    """Group -> the choice that config.yaml makes: a name, a list of names, or None for no
    choice."""
    return {
        group: choice
        for entry in _load(CONF / "config.yaml")["defaults"]
        if isinstance(entry, dict)
        for group, choice in entry.items()
        if not group.startswith("override ")
    }


def fixed(group: str, choice: str) -> dict[str, str]:
    """Other groups' choices that this choice is defined by: {"server_opt": "fedadam"} for the
    method fedadam."""
    entries = _load(CONF / group / f"{choice}.yaml").get("defaults", [])
    overrides = [item for entry in entries if isinstance(entry, dict) for item in entry.items()]
    return {
        key.removeprefix("override /").partition("@")[0]: value
        for key, value in overrides
        if key.startswith("override /")
    }


def title(group: str, choice: str) -> str:
    """The first comment of the choice's file, its package line aside; empty where there is none."""
    for line in (CONF / group / f"{choice}.yaml").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            return line.removeprefix("#").strip()
    return ""


def settings(path: str) -> list[Setting]:
    """The scalar settings in `<path>.yaml` that carry a help comment, keys of a block dotted:
    eval.every."""
    found: list[Setting] = []
    block = ""
    for line in (CONF / f"{path}.yaml").read_text(encoding="utf-8").splitlines():
        match = _SETTING.fullmatch(line)
        if match is None:
            continue
        if not match["indent"]:
            block = "" if match["value"] else f"{match['key']}."
        if match["value"] and match["help"] and len(match["indent"]) == (2 if block else 0):
            found.append(Setting(f"{block}{match['key']}", match["value"], match["help"]))
    return found


def _load(path: Path) -> dict[str, Any]:
    content: Any = OmegaConf.to_container(OmegaConf.load(path))
    return content
