"""Checks that Flower's own loops are the ones that this package changes."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType

from flwr.supercore.version import package_version

from fedhet.errors import RunFailed


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
                f"flwr {package_version} is not the one that `deploy node` is made for:"
                f" {name}.{function} has no {missing[0]!r}; start flower-supernode instead, with"
                ' node = "flower-supernode" in site.toml'
            )
    return module
