"""Hydra's own settings, `hydra.*`: what they may name, read and write.

Hydra calls the launcher, the sweeper and the callbacks, and Python's logging whatever its settings
name. Both find a name by walking through attributes, so `logging.os.system` is a function to them.
Here a name must be one of a list, or be defined by its module.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any

from hydra.experimental.callback import Callback
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig, OmegaConf

from fedhet.config import pieces, targets
from fedhet.config.interpolations import SETTING
from fedhet.core.errors import ConfigError

# They are trusted also where hydra_plugins is missing: in a FAB, and on a node of a Ray cluster.
_OWN = (
    "hydra_plugins.fedhet.ProcessesLauncher",
    "hydra_plugins.fedhet.RayLauncher",
    "hydra_plugins.fedhet.sweeper.ProductSweeper",
)
# The only places of a `_target_`: the modules in which its class may be, and the class's base.
_PLUGINS = {
    "launcher": ("hydra._internal.core_plugins", Launcher),
    "sweeper": ("hydra._internal.core_plugins", Sweeper),
    "callbacks": ("hydra.experimental.callbacks", Callback),
}
_LOGGING = ("job_logging", "hydra_logging")
_LOGGING_CLASSES = (
    "logging.StreamHandler",
    "logging.FileHandler",
    "logging.NullHandler",
    "logging.Formatter",
    "colorlog.ColoredFormatter",
)
# They set attributes, call functions, or format a record with str.format, which reads attributes.
_LOGGING_REFUSED = (".", "queue", "listener", "target", "style", "validate")
_STREAMS = ("ext://sys.stdout", "ext://sys.stderr")
_LOG_FILE = re.compile(
    r"(\$\{hydra\.runtime\.output_dir\}/|hydra-)([\w.-]|\$\{hydra\.job\.(name|num|id)\})+"
)
# What an interpolation may begin with. Each of the resolvers returns a text or a number. What
# Hydra or logging calls may not read texts of overrides, which can have a `$` of their own.
_HYDRA = re.compile(r"\$\{hydra(\.\w+)+\}")
_HYDRA_CALLED = re.compile(
    r"\$\{hydra\.(runtime\.(output_dir|cwd|version)|job\.(name|num|id|config_name)|sweep\.dir)\}"
)
_RESOLVER = re.compile(r"\$\{(now|python_version|hydra|oc\.env|fedhet\.\w+):")
_TEXTS = ("help", "hydra_help")  # they are printed, and have a `$` of their own


def check(hydra: DictConfig, settings: DictConfig) -> None:
    """Refuse code outside of Hydra, its plugins and logging, and files outside of the run folder.

    These settings must not change what is trusted either, and a file may set no environment
    variable, PYTHONPATH for example.

    Args:
        hydra: Hydra's settings, with their interpolations.
        settings: the other settings, without interpolations.

    Raises:
        ConfigError: naming the key.
    """
    content: Any = OmegaConf.to_container(hydra)
    given = "\n".join(content.pop("overrides")["hydra"])
    content["job"].pop("override_dirname", None)  # the text of the overrides
    for path, name, value in targets.walk(content, "hydra"):
        section = path.split(".")[1]
        if name == "_target_":
            _check_plugin(path, value)
        if section in _LOGGING:
            _check_logging(path, name, value, given)
        elif name in ("class", "()"):
            raise _not_trusted(path, value, _LOGGING_CLASSES)
        if isinstance(value, str) and section not in _TEXTS:
            _check_interpolations(path, value, settings)
        elif isinstance(value, str) and re.search(r"\boc\.", value):
            raise _unreadable(path, value)
    _check_places(hydra)
    _check_variables(hydra, given)


def _check_plugin(path: str, target: object) -> None:
    section = path.split(".")[1]
    own, base = _PLUGINS.get(section, ("", object))
    place = f"hydra.{section}{'.*' if section == 'callbacks' else ''}._target_"
    if own and re.fullmatch(place.replace(".*", r"\.[^.]+").replace("hydra.", r"hydra\."), path):
        trusted = (own, "hydra_plugins")
        targets.check_trusted(path, target, trusted)
        if section == "launcher" and target in _OWN:
            return
        thing = targets.defined(str(target))
        if isinstance(thing, type) and issubclass(thing, base):
            return
        raise ConfigError(f"{path}={target} is not trusted: it is no {base.__name__} of Hydra")
    raise ConfigError(f"{path}={target} is not trusted: Hydra needs no _target_ here")


def _check_logging(path: str, name: str, value: object, given: str) -> None:
    if name in ("class", "()") and value not in _LOGGING_CLASSES:
        raise _not_trusted(path, value, _LOGGING_CLASSES)
    if name in _LOGGING_REFUSED:
        raise ConfigError(f"{path}={value} is not allowed in logging settings")
    if name == "filename" and not (isinstance(value, str) and _LOG_FILE.fullmatch(value)):
        if f"{name}={value}" in given or f"{name}: {value}" in given:
            return  # whoever writes the command line may also name a file
        raise ConfigError(
            f"{path}={value} is not allowed in a file; write ${{hydra.runtime.output_dir}}/<name>"
        )
    if isinstance(value, str) and "://" in value and value not in _STREAMS:
        raise ConfigError(f"{path}={value} is not allowed; choose from: {', '.join(_STREAMS)}")


def _check_interpolations(path: str, value: str, settings: DictConfig) -> None:
    """Refuse interpolations that could bring in more than a text: settings, or a further `${`."""
    called = path.split(".")[1] in (*_PLUGINS, *_LOGGING)
    for place in (found.start() for found in re.finditer(r"\$", value)):
        if (_HYDRA_CALLED if called else _HYDRA).match(value, place):
            continue
        if _RESOLVER.match(value, place):
            continue
        setting = SETTING.match(value, place)
        read = OmegaConf.select(settings, setting[0][2:-1]) if setting else None
        if read is None or OmegaConf.is_config(read) or "$" in str(read):
            raise _unreadable(path, value)


def _check_places(hydra: DictConfig) -> None:
    """Refuse names that lead out of the run folder, where Hydra writes them."""
    for key in ("output_subdir", "job.name"):
        name = OmegaConf.select(hydra, key)
        if name is not None and (PurePath(name).is_absolute() or ".." in PurePath(name).parts):
            raise ConfigError(f"hydra.{key}={name} is not allowed; it must be below the run folder")
    if "/" in str(hydra.job.name):
        raise ConfigError(f"hydra.job.name={hydra.job.name} is not allowed; it is no path")


def _check_variables(hydra: DictConfig, given: str) -> None:
    lines = "\n".join(line for line in given.splitlines() if "env_set" in line)
    for name in map(str, hydra.job.env_set):
        own = name in (pieces.TRUST, pieces.SEARCH_PATH)
        if own or not re.search(rf"\b{re.escape(name)}\b", lines):
            raise ConfigError(
                f"hydra.job.env_set.{name} is not allowed{'' if own else ' in a file'}; set the"
                f" environment variable {name} yourself"
            )


def _unreadable(path: str, value: str) -> ConfigError:
    return ConfigError(
        f"{path}={value} is not allowed: Hydra's settings refer to hydra.*, to single values of"
        " other settings by their full names, and to now, oc.env and python_version; oc.create,"
        " oc.decode and the like could name code"
    )


def _not_trusted(path: str, value: object, allowed: tuple[str, ...]) -> ConfigError:
    return ConfigError(f"{path}={value} is not trusted; allowed: {', '.join(allowed)}")
