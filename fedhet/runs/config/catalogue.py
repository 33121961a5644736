"""Reads groups, choices, settings and their help from conf/ and the folders of own components.

It reads without Hydra, so that the help text appears at once. A group is a folder of conf/. A
choice of the group is a file in this folder of conf/ or of any other conf folder; no two folders
may have the same choice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf._utils import get_yaml_loader

from fedhet.core.check import did_you_mean
from fedhet.core.errors import MachineError
from fedhet.runs.config import components

_PACKAGE = Path(__file__).resolve().parents[2]


# Inside the package if it was installed from a wheel, else next to it.
CONF: Path = next(filter(Path.is_dir, [_PACKAGE / "conf"]), _PACKAGE.parent / "conf")

# Why a method is not a plug-in.
ONE_METHOD = (
    "a run has exactly one method, which defines the aggregation; for example, fedsa replaces the"
    " mean of the changes, and the server steps of fednova and scaffold need this mean"
)

RENAMED = {
    "eval.targets": ["eval.thresholds"],
    "engine.vectorize": ["engine.fused"],
    "learning_rate": ["client.lr"],  # its name in other programs
}
ALL_SETTINGS = "python -m fedhet --help lists all settings"
_GLOBAL = "# @package _global_"
_HEAD = re.compile(r"\A(?:# @package.*\n)?#(?! @package)(?P<title>.*)\n")
_HYDRAS_OWN = ("_target_", "defaults", "hydra")


class YamlSetting(NamedTuple):
    """A setting of a YAML file.

    Attributes:
        key: its name, with dots inside a block.
        value: its value as the text in the file.
        help: the comment behind the value, or else the comment above the key; "" if there is none.
        note: the comment above the key if there is also a comment behind the value, else "".
    """

    key: str
    value: str
    help: str
    note: str


def folders() -> tuple[Path, ...]:
    """Return conf/, then the folders of own components (fedhet/runs/config/components.py).

    Raises:
        ConfigError: a folder does not exist, or has a yaml file that belongs to no group.
    """
    found = [*(component.folder for component in components.installed()), *components.search_path()]
    own = dict.fromkeys(folder for folder in found if folder != CONF)
    for folder in own:
        _check_layout(folder)
    return (CONF, *own)


def groups() -> dict[str, tuple[str, ...]]:
    """Return group -> its choices."""
    return {group: choices(group) for group in _group_names()}


def choices(group: str) -> tuple[str, ...]:
    """Return the choices of a group in alphabetical order; `folder/name` if in a subfolder."""
    return tuple(sorted(_files(group)))


def shown(group: str) -> tuple[str, ...]:
    """Return the choices of a group that users are shown, without internal ones.

    The file of an internal choice has a comment that begins with "Internal:". Choices in a
    subfolder of the same name are internal, too.
    """
    names = choices(group)
    internal = {
        name
        for name in names
        if any(remark.startswith("Internal:") for remark in remarks(f"{group}/{name}"))
    }
    return tuple(name for name in names if not internal & {name, name.partition("/")[0]})


def file(path: str) -> Path:
    """Return the file of a path `<group>/<choice>` or `config`.

    For `<group>/torchvision/<name>` it is torchvision.yaml.
    """
    group, _, choice = path.partition("/")
    if not choice:
        return CONF / f"{group}.yaml"
    files = _files(group)
    return files.get(choice) or files[choice.partition("/")[0]]


def built_in(group: str) -> tuple[str, ...]:
    """Return the choices of a group that are part of fedhet, in alphabetical order."""
    return tuple(name for name, path in sorted(_files(group).items()) if path.is_relative_to(CONF))


def content(group: str, choice: str = "") -> dict[str, Any]:
    """Return the content of the choice's file.

    Args:
        group: the group, or "config" for config.yaml.
        choice: a choice of the group; "" for config.yaml.

    Raises:
        ConfigError: the file is not valid YAML, or holds no settings.
    """
    return _load(file(f"{group}/{choice}"))


def target(group: str, choice: str) -> str | None:
    """Return the class that the choice's file names, or None if it names none."""
    return _target(group, file(f"{group}/{choice}"))


def _target(group: str, path: Path) -> str | None:
    settings = _load(path)
    own = settings.get(group)  # in a file that also presets other groups
    name: str | None = (own if isinstance(own, dict) else settings).get("_target_")
    return name


def targets() -> frozenset[str]:
    """Return the classes and functions that fedhet's own yaml files name."""
    return _targets(CONF)


@lru_cache(maxsize=2)
def _targets(conf: Path) -> frozenset[str]:
    named = (
        _target(group, path) for group in _group_names() for path in (conf / group).rglob("*.yaml")
    )
    return frozenset(name for name in named if name)


def overrides_of_choice(choice: str) -> list[str]:
    """Return `group=choice` for every group that has this choice."""
    return [f"{group}={choice}" for group, names in groups().items() if choice in names]


def defaults() -> dict[str, str | list[str] | None]:
    """Return group -> the choice in config.yaml: a name, a list of names, or None for no choice."""
    chosen = _chosen("config").items()
    return {group: choice for group, choice in chosen if not group.startswith("override ")}


def fixed_choices(group: str, choice: str) -> dict[str, str]:
    """Return the choices of other groups that belong to the definition of this choice.

    Example: {"server_opt": "fedadam"} for the method fedadam.
    """
    return {
        key.removeprefix("override /").partition("@")[0]: value
        for key, value in _chosen(group, choice).items()
        if key.startswith("override /")
    }


def _chosen(*path: str) -> dict[str, Any]:
    """Return group -> choice from the defaults list of a file."""
    entries = content(*path).get("defaults", [])
    return {
        key: value for entry in entries if isinstance(entry, dict) for key, value in entry.items()
    }


def title(group: str, choice: str) -> str:
    """Return the first comment of the choice's file, without the `# @package` line; "" if none."""
    head = _HEAD.match(file(f"{group}/{choice}").read_text(encoding="utf-8"))
    return head["title"].strip() if head else ""


def brought(group: str, choice: str) -> list[tuple[str, str]]:
    """Return the (group, choice) pairs that this choice brings, such as a method's plug-in."""
    entries = content(group, choice).get("defaults", [])
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
    """Return the settings of `<path>.yaml`; keys inside a block have dots: `eval.every`.

    Keys that only Hydra reads are left out, and so is a `name` that equals the file's name. A file
    with `@package _global_` gives an empty list; see `presets`.
    """
    text = file(path).read_text(encoding="utf-8")
    return [] if _GLOBAL in text else _leaves(text, path.rpartition("/")[2])


def presets(path: str) -> list[YamlSetting]:
    """Return the settings of a `@package _global_` file, such as an experiment's, by full keys."""
    text = file(path).read_text(encoding="utf-8")
    return _leaves(text, "") if _GLOBAL in text else []


def remarks(path: str) -> list[str]:
    """Return the comments of `<path>.yaml` that belong to no key because a blank line follows."""
    text = "\n".join(_lines(file(path).read_text(encoding="utf-8")))
    blocks = re.findall(r"^(?: *#.*\n)+(?! *\S)", text, re.MULTILINE)
    return [_words(block.splitlines()) for block in blocks]


def _leaves(text: str, name: str) -> list[YamlSetting]:
    lines = _lines(text)

    def below(node: yaml.MappingNode, prefix: str) -> Iterator[YamlSetting]:
        for key, value in node.value:
            dotted = f"{prefix}{key.value}"
            if key.value in _HYDRAS_OWN or (dotted == "name" and value.value == name):
                continue
            if isinstance(value, yaml.MappingNode):
                yield from below(value, f"{dotted}.")
                continue
            begin, end = value.start_mark, value.end_mark
            scalar = isinstance(value, yaml.ScalarNode)
            # A list with one line per entry, or a text after | or >, ends before the next key.
            block = value.style in ("|", ">") if scalar else not value.flow_style
            behind = "" if block else lines[end.line][end.column :].strip().lstrip("# ")
            before = reversed(lines[: key.start_mark.line])
            comments = [*takewhile(lambda line: line.lstrip().startswith("#"), before)]
            helps = [*filter(None, (behind, _words(comments[::-1])))]
            yield YamlSetting(
                dotted, text[begin.index : end.index], "".join(helps[:1]), "".join(helps[1:])
            )

    root = yaml.compose(text, Loader=yaml.SafeLoader)
    return list(below(root, "")) if isinstance(root, yaml.MappingNode) else []


def _lines(text: str) -> list[str]:
    """Return the lines of a file; the title and the `# @package` line become empty lines."""
    return _HEAD.sub(lambda head: "\n" * head[0].count("\n"), text).splitlines()


def _words(comment: Sequence[str]) -> str:
    return " ".join(line.lstrip("# ") for line in comment)


def _group_names() -> list[str]:
    """Return the groups of a run; conf/hydra is left out, because it belongs to Hydra's groups."""
    return sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name != "hydra")


def _files(group: str) -> dict[str, Path]:
    """Return choice -> its file."""
    files: dict[str, Path] = {}
    for root in (folder / group for folder in folders()):
        for path in root.rglob("*.yaml"):
            choice = path.relative_to(root).with_suffix("").as_posix()
            if choice in files:
                raise MachineError(
                    f"{group}={choice} exists twice: {files[choice]} and {path}; rename one of them"
                )
            files[choice] = path
    return files


def _check_layout(folder: Path) -> None:
    """Refuse yaml files that belong to no group, or that would change Hydra itself."""
    known = _group_names()
    for path in sorted(folder.iterdir()):
        stray = next(path.rglob("*.yaml"), None) if path.is_dir() else path
        if path.name not in known and stray is not None and stray.suffix == ".yaml":
            raise MachineError(
                f"{stray} belongs to no group{did_you_mean(path.name, known)}; folders in {folder}"
                f" must be named after a group: {', '.join(known)}"
            )


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads YAML as OmegaConf does, in a tenth of the time, because every run reads many files."""

    yaml_implicit_resolvers = get_yaml_loader().yaml_implicit_resolvers


def _load(path: Path) -> dict[str, Any]:
    try:
        loaded: Any = _Loader(path.read_text(encoding="utf-8")).get_single_data()
    except (yaml.YAMLError, OSError) as error:
        raise MachineError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, dict):
        raise MachineError(f"{path}: it must hold settings `key: value`")
    return loaded
