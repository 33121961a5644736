"""Checks that Flower's own loops are the ones that this package changes."""

from __future__ import annotations

import importlib
import inspect
from functools import partial
from types import ModuleType

from flwr.supercore.version import package_version

from fedhet.core.errors import RunFailed


def flower_module(name: str, **expected: tuple[str, ...]) -> ModuleType:
    """A module of Flower.

    Args:
        name: the module's name.
        expected: for each of its functions what its source must contain.

    Raises:
        RunFailed: it has another shape, as in other versions of Flower.
    """
    module = importlib.import_module(name)
    for function, parts in expected.items():
        found = getattr(module, function, None)
        source = inspect.getsource(found) if inspect.isfunction(found) else ""
        if missing := [part for part in parts if part not in source]:
            raise RunFailed(
                f"flwr {package_version} is not the one that `deploy` is made for:"
                f" {name}.{function} has no {missing[0]!r}; install the version of versions.json,"
                " or start Flower's own program"
            )
    return module


def without_docs(name: str) -> None:
    """Let a server of Flower describe its API to nobody: no /docs, no /openapi.json.

    Args:
        name: of its module, which makes the server.

    Raises:
        RunFailed: it makes it in another way.
    """
    module = flower_module(name, create_app=("= FastAPI(", 'docs_url="/docs"'))
    vars(module)["FastAPI"] = partial(module.FastAPI, openapi_url=None)
