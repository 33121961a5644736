"""What conf/ and the folders of one's own pieces offer: groups, choices, settings and their help.

They are read without Hydra, so that the help text appears at once. A group is a folder of conf/; a
choice of it is a file in any of the folders, and no two folders may have the same one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import OmegaConf

from fedhet.check import did_you_mean
from fedhet.config import pieces
from fedhet.errors import ConfigError

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


def folders() -> tuple[Path, ...]:
    """Return conf/, then the folders of one's own pieces (fedhet/config/pieces.py).

    Raises:
        ConfigError: there is no such folder, or it holds what is no choice of a group.
    """
    own = dict.fromkeys(folder for folder in pieces.folders() if folder != CONF)
    for folder in own:
        _check_layout(folder)
    return (CONF, *own)


def groups() -> dict[str, tuple[str, ...]]:
    """Return group -> its choices."""
    return {group: choices(group) for group in _group_names()}


def choices(group: str) -> tuple[str, ...]:
    """Return the choices of a group in alphabetical order; one in a subfolder is `folder/name`."""
    return tuple(sorted(_files(group)))


def file(path: str) -> Path:
    """Return `<path>.yaml`, where path is `<group>/<choice>` or `config`, in its folder."""
    group, _, choice = path.partition("/")
    return _files(group)[choice] if choice else CONF / f"{path}.yaml"


def built_in(group: str) -> tuple[str, ...]:
    """Return those choices of a group that are part of fedhet, in alphabetical order."""
    return tuple(name for name, path in sorted(_files(group).items()) if path.is_relative_to(CONF))


def content(group: str, choice: str) -> dict[str, Any]:
    """Return what the choice's file says; for `torchvision/<name>` that is `torchvision`.

    Raises:
        ConfigError: the file is no YAML, or holds no settings.
    """
    files = _files(group)
    return _load(files.get(choice) or files[choice.partition("/")[0]])


def target(group: str, choice: str) -> str | None:
    """Return the class that the choice's file names, or None if it names none."""
    settings = content(group, choice)
    own = settings.get(group)  # in a file that also presets other groups
    name: str | None = (own if isinstance(own, dict) else settings).get("_target_")
    return name


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
    entries = content(group, choice).get("defaults", [])
    pairs = [pair for entry in entries if isinstance(entry, dict) for pair in entry.items()]
    return {
        key.removeprefix("override /").partition("@")[0]: value
        for key, value in pairs
        if key.startswith("override /")
    }


def title(group: str, choice: str) -> str:
    """Return the first comment of the choice's file, without the `# @package` line; "" if none."""
    for line in file(f"{group}/{choice}").read_text(encoding="utf-8").splitlines():
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
    for line in file(path).read_text(encoding="utf-8").splitlines():
        match = _SETTING_LINE.fullmatch(line)
        if match is None:
            continue
        if not match["indent"]:
            block = "" if match["value"] else f"{match['key']}."
        depth = 2 if block else 0
        if match["value"] and match["help"] and len(match["indent"]) == depth:
            documented.append(YamlSetting(f"{block}{match['key']}", match["value"], match["help"]))
    return documented


def _group_names() -> list[str]:
    return sorted(path.name for path in CONF.iterdir() if path.is_dir())


def _files(group: str) -> dict[str, Path]:
    """Return choice -> its file."""
    files: dict[str, Path] = {}
    for root in (folder / group for folder in folders()):
        for path in root.rglob("*.yaml"):
            choice = path.relative_to(root).with_suffix("").as_posix()
            if choice in files:
                raise ConfigError(
                    f"{group}={choice} exists twice: {files[choice]} and {path}; rename one of them"
                )
            files[choice] = path
    return files


def _check_layout(folder: Path) -> None:
    """Refuse yaml files that no group would find, or that would change Hydra itself."""
    known = _group_names()
    for path in sorted(folder.iterdir()):
        stray = next(path.rglob("*.yaml"), None) if path.is_dir() else path
        if path.name not in known and stray is not None and stray.suffix == ".yaml":
            raise ConfigError(
                f"{stray} belongs to no group{did_you_mean(path.name, known)}; the folders in"
                f" {folder} must be among {', '.join(known)}"
            )


def _load(path: Path) -> dict[str, Any]:
    try:
        loaded: Any = OmegaConf.to_container(OmegaConf.load(path))
    except (yaml.YAMLError, OSError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: it must hold settings `key: value`")
    return loaded
