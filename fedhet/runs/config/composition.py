"""Composes a run's configuration from conf/ and the overrides, and checks it.

It imports neither torch nor Flower.
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
# Keys of an experiment's file that describe the experiment itself; a single run has none of them.
EXPERIMENT_KEYS = ("axes", "tune", "report", "scale", "scales", "on_other_code", "paper")
_LOCK = threading.Lock()  # Hydra's state is one object per process
# These settings of Hydra do not affect the composition.
_OUTPUT_SETTINGS = ("hydra.run.", "hydra.sweep.")


@dataclass(frozen=True)
class Config:
    """One run's configuration.

    Attributes:
        cfg: the settings, resolved, checked and read-only, without Hydra's own.
        choices: group -> choice, for every group except plugin (see `plugins`); a group without a
            choice is absent. If an override sets a `_target_` other than the file's, the choice is
            the name of that class.
        run_dir: absolute path of the run folder; "" if the configuration comes from `cached`.
        run_dir_given: whether the user named the run folder, by hydra.run.dir=...
        overrides: the overrides that give `cfg`, without overrides of Hydra's own settings.
        resumes: whether this continues the run in the run folder.
    """

    cfg: DictConfig
    choices: dict[str, str]
    run_dir: str
    run_dir_given: bool
    overrides: tuple[str, ...]
    resumes: bool = False

    @cached_property
    def run(self) -> RunSettings:
        """The settings that are plain values (not a `_target_` class), as checked objects."""
        return validation.validate(self.cfg)

    @property
    def plugins(self) -> tuple[str, ...]:
        """The active plug-ins in order: first the method's own, then the list in plugin=[...]."""
        return tuple(str(name) for name in self.cfg.plugin)


class Bases:
    """Composes configurations as `load` does, but faster.

    Hydra takes a tenth of a second for each configuration, and most runs of a sweep make the same
    choices. So `Bases` reads the files and composes the configuration only once for all runs that
    make the same choices. It sets the values of each run in a copy, as Hydra sets them. Use one
    object for one sweep: it does not notice files that change.

    Args:
        load: composes a configuration from overrides, with Hydra's settings.
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
            return self._load(list(lines))  # again, because Hydra's own error message is clearer

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
        """Whether the override only sets values, and does not change which files are read."""
        key = override.key_or_group
        if override.type != OverrideType.CHANGE or override.package is not None or "/" in key:
            return False
        if override.is_hydra_override():
            return key.startswith(_OUTPUT_SETTINGS)
        return key.partition(".")[0] not in self._groups or "." in key


def compose(lines: Sequence[str], *, bases: Bases | None = None) -> Config:
    """Compose and check the configuration of one run from its overrides.

    It may be called in threads and inside a Hydra application.

    Args:
        lines: the overrides.
        bases: composes the runs of a sweep faster; None for a single run.

    Raises:
        ConfigError: a name or key is unknown, a value is out of range, an object is not trusted,
            or the run of resume=... cannot continue.
    """
    folder, lines = resuming.continued(lines)
    if folder is not None:
        try:
            resumed = compose(lines)
        except UnknownChoice as error:
            raise UnknownChoice(
                f"{error} (the run in {folder} uses it; add the folder of your own components by"
                " --config-dir <folder>)"
            ) from error
        return replace(resumed, run_dir=str(folder), run_dir_given=True, resumes=True)
    parsed = overrides.parse(lines)
    texts = overrides.of_single_run(parsed)
    try:
        cfg = bases(texts) if bases else _hydra_config(texts)
    except ConfigError:
        # Hydra's message does not say what is allowed, so check the keys here first.
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
    """Compose the overrides of an app once, because a node needs them for every message.

    `run_dir` is "", because two runs with the same overrides need two folders: a folder's name
    contains the time.
    """
    return replace(compose(lines), run_dir="")


def sweep_runs(lines: Sequence[str], bases: Bases) -> list[tuple[str, ...]]:
    """Check the values of a sweep, and return the overrides of each of its runs.

    It does not compose every run. It composes enough runs that every combination of choices, and
    every value, occurs at least once. Of a range, it composes only the two ends. This is enough,
    because the names and limits of two settings do not depend on each other.

    Args:
        lines: the overrides of the sweep.
        bases: composes the sweep's runs.

    Raises:
        ConfigError: as in `compose`; the message names the first wrong run.
    """
    parsed = overrides.parse(lines)
    runs = overrides.product(parsed)
    groups = catalogue.groups()
    ranges = [each for each in parsed if isinstance(each.value(), RangeSweep)]
    covered: set[object] = {line for each in ranges for line in overrides.each_value(each)[1:-1]}
    for run in runs:
        covers = {*run, tuple(line for line in run if key_of(line) in groups)}
        if covers <= covered:
            continue
        covered |= covers
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
        settings: the launcher's settings.
        folder: absolute path of the folder that holds the run folders.
    """

    launcher: str
    settings: dict[str, Any]
    folder: Path


def launching(lines: Sequence[str]) -> Launching:
    """Return how the runs of a sweep or an experiment are started.

    Args:
        lines: the overrides of one of the runs.

    Raises:
        ConfigError: an override is wrong.
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
    """Return the name of a run's folder inside the folder of its sweep.

    Args:
        lines: the run's overrides.
        number: the run's number.
        varied: the overrides that differ between runs, as one text.
        bases: composes the sweep's runs.
    """
    cfg = bases(lines)
    with as_config_error():
        cfg.hydra.job.update(num=number, override_dirname=varied)
        return str(cfg.hydra.sweep.subdir)


def shown(lines: Sequence[str]) -> str:
    """Return the configuration of one run as YAML, for --cfg job.

    Raises:
        ConfigError: it cannot be composed.
    """
    compose([line for line in lines if not hydra_settings.is_hydras(key_of(line))])
    return OmegaConf.to_yaml(raw(lines))


def label(lines: Sequence[str], fixed: Collection[str] = ()) -> str:
    """Return a run's overrides as text for users; in a sweep, only the overrides that vary.

    Args:
        lines: the overrides of the run.
        fixed: the keys that all runs of the sweep set to the same value.
    """
    varied = [line for line in lines if key_of(line) not in fixed]
    own = [line for line in varied or lines if not line.lstrip("+").startswith("hydra")]
    return " ".join(line.lstrip("+") for line in own) or "the defaults"


def raw(lines: Sequence[str]) -> DictConfig:
    """Return the configuration of these overrides, without checks and with its interpolations.

    Raises:
        ConfigError: it cannot be composed.
    """
    cfg = _hydra_config(overrides.of_single_run(overrides.parse(lines)))
    with open_dict(cfg):
        cfg.pop("hydra")
    return cfg


def of_sweep() -> Bases:
    """Return a new `Bases` with which `compose` composes the runs of one sweep."""
    return Bases(_hydra_config)


def _hydra_config(texts: Sequence[str]) -> DictConfig:
    """Compose with Hydra, and keep the state of a Hydra application that runs in this process."""
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

    The line joins the key, the message and the cause, which both libraries keep separately.
    """
    try:
        yield
    except ConfigError:
        raise
    except yaml.YAMLError as error:  # its message names the file and the place in several lines
        raise MachineError(" ".join(str(error).split())) from error
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        parts = [getattr(error, "full_key", None), error, error.__cause__]
        texts = [
            str(part).replace("composing config:\n", "composing config: ") for part in parts if part
        ]
        lines = [text.partition("\n")[0].rstrip(".") for text in texts]
        raise ConfigError(": ".join(dict.fromkeys(lines))) from error


def _name(node: Any, group: str, choice: str, lines: Sequence[str]) -> str:
    """Return the choice, or the name of the class if an override replaced the file's class."""
    key = f"{group}._target_"
    target = node.get("_target_") if isinstance(node, DictConfig) else None
    own = catalogue.target(group, choice)
    # A file without a class inherits the class of the file that it builds on.
    replaced = target != own if own else any(line.startswith(f"{key}=") for line in lines)
    return instantiation.own_name(key, target) if target and replaced else choice


def _method_name(*, _root_: Any) -> str:
    given: Any = OmegaConf.to_container(_root_.hydra.overrides)
    lines = [line.lstrip("+") for line in given["task"]]
    return _name(_root_.method, "method", _root_.hydra.runtime.choices.method, lines)


def _sweep_subdir(number: int, overrides_of_job: str) -> str:
    """Name the folder of a sweep's job by its number, which is unique, and its overrides."""
    words = re.sub(r"[^a-zA-Z0-9_.,=+-]+", "_", overrides_of_job.replace("++", ""))
    return f"{number}-{words}"[:80].rstrip("-_,")


# conf/config.yaml calls these.
OmegaConf.register_new_resolver("fedhet.method", _method_name, replace=True)
OmegaConf.register_new_resolver(
    "fedhet.searchpath",
    lambda: [f"file://{folder}" for folder in catalogue.folders()[1:]],
    replace=True,
)
OmegaConf.register_new_resolver("fedhet.subdir", _sweep_subdir, replace=True)
