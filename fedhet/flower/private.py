"""Private names of Flower that fedhet uses. Flower does not promise to keep them.

Otherwise fedhet uses only Flower's commands and the exports of its documented packages. No version
is compared: fedhet looks for each name and its parameters when it needs the name.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from functools import partialmethod
from importlib.metadata import entry_points
from typing import Any

import flwr

from fedhet.core.errors import RunFailed

# Path of a function -> the parameters that fedhet passes to it, or that Flower passes to fedhet's
# replacement. A path begins with the name of a command. The names after it are looked up one by
# one. After a function, a name is looked up among the global variables of the function's module, if
# the functions of this module use it. Otherwise it is looked up among the attributes.
SUPERNODE = "flower-supernode"
START = f"{SUPERNODE}:start_client_internal"
_CLIENT = "flwr-clientapp:run_clientapp"
NAMES = {
    START: "state_factory isolation runtime_api_address runtime_certificates"
    " runtime_root_certificates_path runtime_dependency_install",
    f"{START}.time": "",
    f"{START}.get_fused_config_from_fab": "fab_file run",
    f"{START}.NodeState.get_tasks": "statuses",
    f"{START}.NodeState.claim_task": "task_id",
    _CLIENT: "token",
    f"{_CLIENT}.install_from_fab": "fab_file",
    f"{_CLIENT}.flwr_exit": "code",
    f"{_CLIENT}.flwr_exit.trigger_exit_handlers": "run_before_force_exit",
}
OF_NODES = [name for name in NAMES if name.startswith((START, _CLIENT))]


def private(name: str) -> Any:
    """Return Flower's object under one of NAMES.

    Raises:
        RunFailed: Flower does not have it, does not use it, or it takes other parameters.
    """
    start, _, rest = name.partition(":")
    found = command(start)
    for part in rest.split("."):
        found = _part(found, part)
    needed = NAMES[name].split()
    has = inspect.signature(found).parameters if callable(found) else dir(found)
    if found is None or not {*needed} <= {*has}:
        raise _missing(f"{name} with {' '.join(needed)}" if needed else name)
    return found


def _missing(name: str) -> RunFailed:
    return RunFailed(f"fedhet needs Flower's {name}, which flwr {flwr.__version__} does not have")


def _part(owner: Any, name: str) -> Any:
    """Return a name's value in a module, a class, or the module of a function; None if unknown."""
    if not inspect.isfunction(owner):
        return getattr(owner, name, None)
    found = owner.__globals__.get(name)
    # If no function of the module uses the name, its replacement would never be called.
    used = any(
        name in function.__code__.co_names
        for function in owner.__globals__.values()
        if inspect.isfunction(function) and function.__globals__ is owner.__globals__
    )
    return found if used or inspect.isclass(found) else None


def command(name: str) -> Any:
    """Return the function of one of Flower's commands.

    Raises:
        RunFailed: Flower has no such command.
    """
    for entry in entry_points(group="console_scripts", name=name):
        return entry.load()
    raise _missing(f"command {name}")


def without_docs() -> None:
    """Switch off /docs and /openapi.json in the servers of this process.

    Call it before Flower is imported: the import already makes the server of a SuperNode.
    """
    with suppress(ModuleNotFoundError):  # without fastapi, Flower has other servers
        from fastapi import FastAPI

        FastAPI.__init__ = partialmethod(FastAPI.__init__, openapi_url=None)  # type: ignore[assignment]
