"""`_target_` in the configuration: which classes it may name, and how they are instantiated.

Hydra's own `instantiate` would call anything.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedhet.core.errors import ConfigError, DataError
from fedhet.runs.config import catalogue, components

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


def check_targets(cfg: DictConfig) -> None:
    """Refuse a `_target_` outside fedhet, installed packages of components and FEDHET_TRUST.

    A configuration must not call arbitrary code. FEDHET_TRUST is an environment variable such as
    `my_package,other.module`; a prefix matches whole names between dots. A machine also trusts
    installed packages with an entry point `fedhet.conf`.

    Raises:
        ConfigError: naming the key and the trusted prefixes.
    """
    for path, name, value in walk(OmegaConf.to_container(cfg, resolve=True)):
        if name == "_target_" and value is not None:
            check_trusted(path, value)


def find_target(node: DictConfig) -> Any:
    """Return the class or function that `node._target_` names.

    Raises:
        ConfigError: the name is not trusted, or there is no such class.
    """
    return find(f"{node._get_full_key(None)}._target_", node._target_)


def find(path: str, target: str) -> Any:
    """Return the class or function of the name `target`, the value of the key `path`.

    Raises:
        ConfigError: as in `find_target`.
    """
    check_trusted(path, target)
    # Other functions of fedhet write files and start processes; no setting may call them.
    hidden = target.startswith("fedhet.") and target not in catalogue.targets()
    thing = defined(target) if not hidden and _NAME.fullmatch(target) else None
    if thing is None:
        where = _where_missing(target.partition(".")[0])
        raise ConfigError(f"{path}={target}: there is no such class{where}")
    return thing


def defined(target: str) -> Any:
    """Return the class or function of this name, or None if its module does not define it.

    The module is imported by its full name. It must define the class itself; a package may define
    it in one of its own modules. Names that the module imports from elsewhere cannot be reached.
    """
    module_name, _, name = target.rpartition(".")
    try:
        thing = getattr(importlib.import_module(module_name), name, None)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, but one of its dependencies is missing
        return None
    own = f"{getattr(thing, '__module__', '')}.".startswith(f"{module_name}.")
    return thing if own and (inspect.isclass(thing) or inspect.isfunction(thing)) else None


def own_name(path: str, target: str) -> str:
    """Return the class attribute `name` of this class, or else the name of the class.

    Raises:
        ConfigError: as in `find_target`.
    """
    thing = find(path, target)
    name = vars(thing).get("name")
    return name if isinstance(name, str) else str(thing.__name__)


def instantiate(node: DictConfig, **kwargs: Any) -> Any:
    """Call what `node._target_` names with the node's other keys and `kwargs`.

    Returns:
        The object, or None if `_target_` is null.

    Raises:
        ConfigError: as in `find_target`; or an argument is unknown or missing; or the constructor
            raised a ValueError or a TypeError.
    """
    if node._target_ is None:
        return None
    target = find_target(node)
    key = node._get_full_key(None)
    settings: Any = OmegaConf.to_container(node, resolve=True)
    arguments = {**settings, **kwargs}
    del arguments["_target_"]
    try:
        inspect.signature(target).bind(**arguments)
    except TypeError as error:
        own = ", ".join(name for name in settings if name != "_target_") or "none"
        given = f"{', '.join(kwargs)} and " if kwargs else ""
        raise ConfigError(
            f"{key} does not fit {node._target_}: {error}; it is called with {given}the settings of"
            f" {key}: {own}"
        ) from error
    try:
        return target(**arguments)
    except (ConfigError, DataError):
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{key}: {error}") from error


def trusted() -> tuple[str, ...]:
    """Return the packages, or prefixes of modules, from which a configuration may name classes."""
    return ("fedhet", *components.trusted_packages())


def check_trusted(path: str, target: object) -> None:
    """Refuse a name outside of the trusted packages.

    Raises:
        ConfigError: naming the key and the trusted prefixes.
    """
    if isinstance(target, str) and any(f"{target}.".startswith(f"{name}.") for name in trusted()):
        return
    raise ConfigError(
        f"{path}={target} is not trusted; allowed: {', '.join(f'{name}.*' for name in trusted())};"
        " the environment variable FEDHET_TRUST adds packages"
    )


def _where_missing(package: str) -> str:
    if package in sys.modules or importlib.util.find_spec(package):
        return ""
    return (
        f"; Python finds no package {package} on this machine: install it (pip install), or add the"
        " folder that contains it to PYTHONPATH"
    )


def walk(node: Any, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield (dotted key, its last part, value) for every value in nested mappings and lists."""
    if not isinstance(node, dict | list):
        return
    for name, inner in node.items() if isinstance(node, dict) else enumerate(node):
        inner_path = f"{path}.{name}" if path else str(name)
        yield inner_path, str(name), inner
        yield from walk(inner, inner_path)
