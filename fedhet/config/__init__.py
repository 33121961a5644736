"""The configuration, composed by Hydra from conf/ and checked.

Nothing here imports torch or Flower. Names are resolved on first use (PEP 562), so that the help
text can read conf/ without importing Hydra.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedhet.config.catalogue import CONF
    from fedhet.config.composition import (
        Config,
        cached,
        check_overrides,
        compose,
    )
    from fedhet.config.validation import validate

_MODULES = {
    "CONF": "fedhet.config.catalogue",
    "Config": "fedhet.config.composition",
    "cached": "fedhet.config.composition",
    "check_overrides": "fedhet.config.composition",
    "compose": "fedhet.config.composition",
    "validate": "fedhet.config.validation",
}
__all__ = [
    "CONF",
    "Config",
    "cached",
    "check_overrides",
    "compose",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
