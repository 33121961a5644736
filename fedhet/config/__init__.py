"""The configuration: composed by Hydra from conf/ and checked. Nothing here imports torch or Flower.

Names are resolved on first use (PEP 562): the help text reads conf/ without importing Hydra.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedhet.config.catalogue import CONF
    from fedhet.config.config import (
        HYDRA_VERSION,
        Config,
        cached,
        check,
        compose,
        of_job,
        validate,
    )

__all__ = ["CONF", "HYDRA_VERSION", "Config", "cached", "check", "compose", "of_job", "validate"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "fedhet.config.catalogue" if name == "CONF" else "fedhet.config.config"
    return getattr(import_module(home), name)
