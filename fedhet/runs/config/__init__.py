"""The configuration: Hydra composes it from conf/, and fedhet checks it.

Nothing here imports torch or Flower. Names are imported on first use (PEP 562), so that the help
text can read conf/ without importing Hydra.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedhet.runs.config.composition import Config, cached, compose

__all__ = ["Config", "cached", "compose"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("fedhet.runs.config.composition"), name)
