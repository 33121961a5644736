"""Composes a run's configuration from conf/ and the overrides, and checks it.

Imports neither torch nor Flower.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, RangeSweep
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from fedhet.core.errors import ConfigError, MachineError, UnknownChoice
from fedhet.runs.config import (
    catalogue,
    hydra_settings,
    instantiation,
    overrides,
    resuming,
    validation,
)
from fedhet.runs.config.instantiation import check_targets
from fedhet.runs.config.lines import key_of
from fedhet.runs.config.validation import RunSettings

HYDRA_VERSION = "1.3"
# What the file of an experiment says of the experiment itself; a single run has none of them.
EXPERIMENT_KEYS = ("axes", "tune", "report", "scale", "scales", "on_other_code", "paper")
_LOCK = threading.Lock()  # Hydra's state is one object per process
# Of Hydra's settings, those that composing ignores.
_FOLDERS = ("hydra.run.", "hydra.sweep.")


@dataclass(frozen=True)
class Config:
    """One run's configuration.

    Attributes:
        cfg: the settings: interpolations resolved, checked, read-only, without Hydra's own.
        choices: group -> choice, for every group but plugin (see `plugins`); a group without a
            choice is absent. Where an override names another class than the choice's file
            (`_target_`), it is the name of that class.
        run_dir: absolute path of the run folder; "" if the configuration comes from `cached`.
        run_dir_given: whether the user named the run folder, by hydra.run.dir=...
        overrides: the overrides that lead to `cfg`, without those of Hydra's own settings.
        resumes: whether this continues the run that the run folder holds.
    """

    cfg: DictConfig
    choices: dict[str, str]
    run_dir: str
    run_dir_given: bool
    overrides: tuple[str, ...]
    resumes: bool = False

    @cached_property
    def run(self) -> RunSettings:
        """The settings that name no class, as checked objects."""
        return validation.validate(self.cfg)

    @property
    def plugins(self) -> tuple[str, ...]:
        """The active plug-ins in order: first the method's own, then those of plugin=[...]."""
        return tuple(str(name) for name in self.cfg.plugin)


class Bases:
    """Composes like `load`, and does not read the files of equal choices again.

    Hydra takes a tenth of a second for each configuration. Most runs of a sweep make the same
    choices, so what these lead to is composed once, and each run's values are set in a copy, as
    Hydra sets them. It is for one sweep: files that change meanwhile are not read again.

    Args:
        load: composes the configuration that overrides lead to, with Hydra's settings.
    """

    def __init__(self, load: Callable[[list[str]], DictConfig]) -> None:
        self._load = load
        self._parser = OverridesParser.create()
        self._groups = frozenset(catalogue.groups())
        self._bases: dict[tuple[str, ...], DictConfig] = {}

    def __call__(self, lines: Sequence[str]) -> DictConfig:
        """Compose the configuration of these overrides."""
        try:
            return self._from_base(lines)
        except (HydraException, OmegaConfBaseException, ValueError):
            return self._load(list(lines))  # which says it better

    def _from_base(self, lines: Sequence[str]) -> DictConfig:
        parsed = self._parser.parse_overrides(list(lines))
        values = [override for override in parsed if self._is_value(override)]
        key = tuple(str(override.input_line) for override in parsed if override not in values)
        if key not in self._bases:
            self._bases[key] = self._load(list(key))
        cfg = deepcopy(self._bases[key])
        for override in values:
            OmegaConf.update(cfg, override.key_or_group, override.value(), merge=True)
        for name, hydras in (("hydra", True), ("task", False)):
            cfg.hydra.overrides[name] = [
                override.input_line for override in parsed if override.is_hydra_override() == hydras
            ]
        return cfg

    def _is_value(self, override: Override) -> bool:
        """Whether it sets values that have no part in which files are read."""
        key = override.key_or_group
        if override.type != OverrideType.CHANGE or override.package is not None or "/" in key:
            return False
        if override.is_hydra_override():
            return key.startswith(_FOLDERS)
        return key.partition(".")[0] not in self._groups or "." in key


def compose(lines: Sequence[str], *, bases: Bases | None = None) -> Config:
    """Compose and check the configuration of one run from its overrides.

    Safe in threads and inside a Hydra application.

    Args:
        lines: the overrides.
        bases: what composes the runs of the same sweep.

    Raises:
        ConfigError: a name or key is unknown, a value is out of range, or an object is not trusted;
            or they name a run to go on with (resume=...) that cannot.
    """
    folder, lines = resuming.continued(lines)
    if folder is not None:
        try:
            resumed = compose(lines)
        except UnknownChoice as error:
            raise UnknownChoice(
                f"{error} (the run in {folder} has it; a folder of your own is given by"
                " --config-dir <folder>)"
            ) from error
        return replace(resumed, run_dir=str(folder), run_dir_given=True, resumes=True)
    parsed = overrides.parse(lines)
    texts = overrides.of_single_run(parsed)
    try:
        cfg = bases(texts) if bases else _hydra_config(texts)
    except ConfigError:
        # Hydra's message does not say what is allowed, so the keys are checked here first.
        chosen = _hydra_config(overrides.choices_only(parsed))
        settings: Any = OmegaConf.to_container(chosen)
        del settings["hydra"]
        overrides.check_keys(parsed, settings)
        raise
    with as_config_error():
        checked = _checked(cfg, texts)
        return replace(checked, run_dir=str(Path(cfg.hydra.run.dir).resolve()))


@lru_cache(maxsize=32)
def cached(lines: tuple[str, ...]) -> Config:
    """Compose the overrides of an app once: each of its nodes does so for every message.

    The run folder is left out, because its name contains the time, and two runs with the same
    overrides need two folders.
    """
    return replace(compose(lines), run_dir="")


def sweep_runs(lines: Sequence[str], bases: Bases) -> list[tuple[str, ...]]:
    """Return the overrides of each run of a sweep, all values of which are checked.

    That takes runs with every combination of the groups' choices, and with every value once, but
    for those between the ends of a range: names and ranges of two settings do not depend on each
    other, and a long sweep is checked quickly.

    Args:
        lines: the overrides of the sweep.
        bases: what composes its runs.

    Raises:
        ConfigError: as `compose` does; it names the first run that is wrong.
    """
    parsed = overrides.parse(lines)
    runs = overrides.product(parsed)
    groups = catalogue.groups()
    ranges = [each for each in parsed if isinstance(each.value(), RangeSweep)]
    checked: set[object] = {line for each in ranges for line in overrides.each_value(each)[1:-1]}
    for run in runs:
        shows = {*run, tuple(line for line in run if key_of(line) in groups)}
        if shows <= checked:
            continue
        checked |= shows
        try:
            compose(run, bases=bases)
        except ConfigError as error:
            raise ConfigError(f"{error} (in the sweep's run {' '.join(run)})") from error
    return runs


@dataclass(frozen=True)
class Launching:
    """How the runs of one command are started.

    Attributes:
        launcher: the choice of hydra/launcher.
        settings: those of the launcher.
        folder: absolute path of the folder that holds the run folders.
    """

    launcher: str
    settings: dict[str, Any]
    folder: Path


def launching(lines: Sequence[str]) -> Launching:
    """Compose how the runs of a sweep or an experiment are started.

    Args:
        lines: the overrides of one of them.

    Raises:
        ConfigError: one of them is wrong.
    """
    texts = overrides.of_single_run(overrides.parse(lines))
    cfg = _hydra_config(texts)
    with as_config_error():
        hydra_settings.check(cfg.hydra, texts)
        settings: Any = OmegaConf.to_container(cfg.hydra.launcher, resolve=True)
        settings.pop("_target_", None)
        folder = Path(cfg.hydra.sweep.dir).absolute()
    return Launching(str(cfg.hydra.runtime.choices["hydra/launcher"]), settings, folder)


def subfolder(lines: Sequence[str], number: int, varied: str, bases: Bases) -> str:
    """Name the folder of a sweep's run, below that of the sweep.

    Args:
        lines: the run's overrides.
        number: that of the run.
        varied: those of the overrides that are not the same for all runs.
        bases: what composes the runs of the sweep.
    """
    cfg = bases(lines)
    with as_config_error():
        cfg.hydra.job.update(num=number, override_dirname=varied)
        return str(cfg.hydra.sweep.subdir)


def shown(lines: Sequence[str]) -> str:
    """The configuration of one run as YAML, for --cfg job.

    Raises:
        ConfigError: it cannot be composed.
    """
    compose([line for line in lines if not hydra_settings.is_hydras(key_of(line))])
    return OmegaConf.to_yaml(raw(lines))


def label(lines: Sequence[str], fixed: Collection[str] = ()) -> str:
    """Return what a run overrides, for people: in a sweep only what varies in it.

    Args:
        lines: the overrides of the run.
        fixed: the keys of those that are the same for all runs.
    """
    varied = [line for line in lines if key_of(line) not in fixed]
    own = [line for line in varied or lines if not line.lstrip("+").startswith("hydra")]
    return " ".join(line.lstrip("+") for line in own) or "the defaults"


def raw(lines: Sequence[str]) -> DictConfig:
    """Return what conf/ says with these overrides: unchecked, and with its interpolations.

    Raises:
        ConfigError: it cannot be composed.
    """
    cfg = _hydra_config(overrides.of_single_run(overrides.parse(lines)))
    with open_dict(cfg):
        cfg.pop("hydra")
    return cfg


def of_sweep() -> Bases:
    """Return what composes the runs of one sweep, for `compose`."""
    return Bases(_hydra_config)


def _hydra_config(texts: Sequence[str]) -> DictConfig:
    """Compose with Hydra; a Hydra application that runs in this process keeps its state."""
    with _LOCK, as_config_error():
        running = GlobalHydra.instance().hydra
        GlobalHydra.instance().hydra = None
        try:
            with initialize_config_dir(
                str(catalogue.CONF), job_name="fedhet", version_base=HYDRA_VERSION
            ):
                cfg = hydra_compose("config", list(texts), return_hydra_config=True)
        finally:
            GlobalHydra.instance().hydra = running
        name = cfg.hydra.runtime.choices.get("experiment")
        where = "a file of the chosen groups" if name is None else f"the file of experiment={name}"
        validation.check_keys(cfg, where, skip=("hydra",))
        return cfg


def _checked(cfg: DictConfig, lines: Sequence[str]) -> Config:
    hydra = cfg.hydra
    choices = {
        str(group): str(name)
        for group, name in hydra.runtime.choices.items()
        if "/" not in str(group) and group != "plugin" and name is not None
    }
    validation.check_fixed_choices(choices)
    cfg = cfg.copy()
    with open_dict(cfg):
        for key in ("hydra", *EXPERIMENT_KEYS):
            cfg.pop(key, None)
    validation.resolve(cfg)
    hydra_settings.check(hydra, lines)
    validation.check_structure(cfg)
    validation.check_server_opt(cfg, choices["server_opt"])
    check_targets(cfg)
    OmegaConf.set_readonly(cfg, True)
    run_dir_given = any(key_of(line) == hydra_settings.RUN_DIR for line in lines)
    lines = tuple(line.lstrip("+") for line in lines if not hydra_settings.is_hydras(key_of(line)))
    names = {
        group: _name(cfg.get(group), group, choice, lines) for group, choice in choices.items()
    }
    config = Config(cfg, names, "", run_dir_given, lines)
    _ = config.run  # checks the values
    return config


@contextmanager
def as_config_error() -> Iterator[None]:
    """Turn errors of Hydra and OmegaConf into a ConfigError of one line.

    Both keep the key and the cause apart from the message; here they become one.
    """
    try:
        yield
    except ConfigError:
        raise
    except yaml.YAMLError as error:  # its lines name the file and the place
        raise MachineError(" ".join(str(error).split())) from error
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        pieces = [getattr(error, "full_key", None), error, error.__cause__]
        texts = [
            str(piece).replace("composing config:\n", "composing config: ")
            for piece in pieces
            if piece
        ]
        lines = [text.partition("\n")[0].rstrip(".") for text in texts]
        raise ConfigError(": ".join(dict.fromkeys(lines))) from error


def _name(node: Any, group: str, choice: str, lines: Sequence[str]) -> str:
    """Name the choice, or the class that an override has put in the place of that of its file."""
    key = f"{group}._target_"
    target = node.get("_target_") if isinstance(node, DictConfig) else None
    own = catalogue.target(group, choice)
    # A file without a class has that of another one, which it builds on.
    replaced = target != own if own else any(line.startswith(f"{key}=") for line in lines)
    return instantiation.own_name(key, target) if target and replaced else choice


def _method_name(*, _root_: Any) -> str:
    given: Any = OmegaConf.to_container(_root_.hydra.overrides)
    lines = [line.lstrip("+") for line in given["task"]]
    return _name(_root_.method, "method", _root_.hydra.runtime.choices.method, lines)


def _search_path() -> list[str]:
    return [f"file://{folder}" for folder in catalogue.folders()[1:]]


def _sweep_subdir(number: int, overrides_of_job: str) -> str:
    """Name the folder of a sweep's job: its number, which is unique, and what it overrides."""
    words = re.sub(r"[^a-zA-Z0-9_.,=+-]+", "_", overrides_of_job.replace("++", ""))
    return f"{number}-{words}"[:80].rstrip("-_,")


# What conf/config.yaml calls.
OmegaConf.register_new_resolver("fedhet.method", _method_name, replace=True)
OmegaConf.register_new_resolver("fedhet.searchpath", _search_path, replace=True)
OmegaConf.register_new_resolver("fedhet.subdir", _sweep_subdir, replace=True)
