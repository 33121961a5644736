"""The places in Flower's programs that `deploy node` and `deploy link` change, and their check."""

from __future__ import annotations

import importlib
import inspect
from functools import partial
from types import ModuleType

from flwr.supercore.version import package_version

from fedhet.core.errors import RunFailed

VERSION = "1.41"


def flower_module(name: str, **functions: str) -> ModuleType:
    """A module of Flower.

    Args:
        name: the module's name.
        functions: those of its functions that are replaced or called, with their parameters.

    Raises:
        RunFailed: Flower has another version, or one of them has other parameters.
    """
    refusal = (
        f"flwr {package_version} is not the one that `deploy` is made for, which is {VERSION}: %s;"
        ' install the version of versions.json, or write node = "flower-supernode" into site.toml'
    )
    if not f"{package_version}.".startswith(f"{VERSION}."):
        raise RunFailed(refusal % "its own loops may be others")
    module = importlib.import_module(name)
    for function, expected in functions.items():
        found = getattr(module, function, None)
        has = " ".join(inspect.signature(found).parameters) if callable(found) else "nothing"
        if has != expected:
            raise RunFailed(refusal % f"{name}.{function} takes {has}, and not {expected}")
    return module


def without_docs(name: str) -> None:
    """Let a server of Flower describe its API to nobody: no /docs, no /openapi.json.

    Args:
        name: of its module, which makes the server.
    """
    module = flower_module(name)
    vars(module)["FastAPI"] = partial(module.FastAPI, openapi_url=None)
