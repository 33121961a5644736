"""The names of Flower that fedhet uses although Flower promises none of them.

All else that fedhet uses are Flower's commands, and what its documented packages export. Nothing
compares versions: a name is looked for where it is needed, with the parameters that are passed.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from functools import partialmethod
from importlib.metadata import entry_points
from typing import Any

import flwr

from fedhet.core.errors import RunFailed

# Each is the name of a command, and what follows it is found name by name: after a function among
# the global variables of its module, which that module's functions use. Then come the parameters
# that are passed, to Flower's function or to what replaces it.
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
    """What Flower has under one of NAMES.

    Raises:
        RunFailed: it has none, does not use it, or it takes other parameters.
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
    """What a module, a class, or the module of a function has under a name, or None."""
    if not inspect.isfunction(owner):
        return getattr(owner, name, None)
    found = owner.__globals__.get(name)
    own = [one for one in owner.__globals__.values() if inspect.isfunction(one)]
    # Otherwise what replaces it would never be called.
    used = any(name in one.__code__.co_names for one in own if one.__globals__ is owner.__globals__)
    return found if used or inspect.isclass(found) else None


def command(name: str) -> Any:
    """The function of one of Flower's commands.

    Raises:
        RunFailed: Flower has no such command.
    """
    for entry in entry_points(group="console_scripts", name=name):
        return entry.load()
    raise _missing(f"command {name}")


def without_docs() -> None:
    """Let the servers of this process describe their API to nobody: no /docs, no /openapi.json.

    Flower makes the one of a SuperNode while it is imported.
    """
    with suppress(ModuleNotFoundError):  # then Flower has other servers
        from fastapi import FastAPI

        FastAPI.__init__ = partialmethod(FastAPI.__init__, openapi_url=None)  # type: ignore[assignment]
