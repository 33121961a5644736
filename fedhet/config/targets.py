"""`_target_` in the configuration: which classes it may name, and how they are made. Hydra's own
`instantiate` would call anything."""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedhet.errors import ConfigError, DataError

# What Hydra's settings may name: launchers and sweepers, and in logging settings handlers ("class")
# and factories ("()").
_HYDRA_TARGETS = ("_target_", "class", "()")
_HYDRA_TRUSTED = ("hydra", "hydra_plugins", "logging", "colorlog")
_RESOLVES_TO_OBJECT = re.compile(r"\boc\.(create|decode)\b")


def check_targets(cfg: DictConfig) -> None:
    """Refuse a `_target_` outside fedhet and the prefixes in FEDHET_TRUST: a configuration must not
    call what it likes.

    FEDHET_TRUST is an environment variable, `my_package,other.module`; a prefix matches whole names
    between dots."""
    for key, name, value in _values(OmegaConf.to_container(cfg, resolve=True)):
        if name == "_target_" and value is not None:
            _check(key, value, _trusted())


def check_hydra_targets(hydra: DictConfig) -> None:
    """The same for Hydra's settings: launchers, sweepers, callbacks, logging; and they must not
    widen FEDHET_TRUST."""
    for key, name, value in _values(OmegaConf.to_container(hydra), "hydra"):
        if name in _HYDRA_TARGETS:
            _check(key, value, _HYDRA_TRUSTED)
        if isinstance(value, str) and _RESOLVES_TO_OBJECT.search(value):
            raise ConfigError(
                f"{key}={value} is not allowed: oc.create and oc.decode could hide a _target_"
            )
    if "FEDHET_TRUST" in hydra.job.env_set:
        raise ConfigError(
            "hydra.job.env_set.FEDHET_TRUST is not allowed; set the environment variable"
            " FEDHET_TRUST yourself"
        )


def find_target(node: DictConfig) -> Any:
    """The class or function that `node._target_` names.

    Raises:
        ConfigError: the name is not trusted, or not found.
    """
    key, target = f"{node._get_full_key(None)}._target_", node._target_
    _check(key, target, _trusted())
    module_name, _, name = target.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), name, None) if module_name else None
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, but lacks a dependency
        found = None
    # Only what comes from that package: `fedhet.<module>.Popen` would reach whatever a module
    # imports.
    if (
        not callable(found)
        or str(getattr(found, "__module__", "")).partition(".")[0] != target.partition(".")[0]
    ):
        raise ConfigError(f"{key}={target}: there is no such class")
    return found


def instantiate(node: DictConfig, **kwargs: Any) -> Any:
    """The object that `node._target_` names, made with the node's other keys and `kwargs`; None
    where `_target_` is null.

    Raises: ConfigError: as `find_target`; or an argument is unknown or missing, or the constructor
        raised ValueError.
    """
    if node._target_ is None:
        return None
    make, key = find_target(node), node._get_full_key(None)
    settings: Any = OmegaConf.to_container(node, resolve=True)
    arguments = {**settings, **kwargs}
    del arguments["_target_"]
    try:
        inspect.signature(make).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{key} does not fit {node._target_}: {error}") from error
    try:
        return make(**arguments)
    except (ConfigError, DataError):
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{key}: {error}") from error


def _trusted() -> tuple[str, ...]:
    return (
        "fedhet",
        *(
            name.strip().rstrip(".")
            for name in re.split("[,:]", os.environ.get("FEDHET_TRUST", ""))
            if name.strip(" .")
        ),
    )


def _check(key: str, target: object, trusted: tuple[str, ...]) -> None:
    if not isinstance(target, str) or not any(
        target.startswith(f"{name}.") or target == name for name in trusted
    ):
        hint = (
            ""
            if key.startswith("hydra.")
            else "; the environment variable FEDHET_TRUST adds packages"
        )
        raise ConfigError(
            f"{key}={target} is not trusted; allowed:"
            f" {', '.join(f'{name}.*' for name in trusted)}{hint}"
        )


def _values(node: Any, key: str = "") -> Iterator[tuple[str, str, Any]]:
    """(dotted key, last part of it, value) of every value in nested mappings and lists."""
    if isinstance(node, dict | list):
        for name, inner in node.items() if isinstance(node, dict) else enumerate(node):
            path = f"{key}.{name}" if key else str(name)
            yield path, str(name), inner
            yield from _values(inner, path)
