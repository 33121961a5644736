"""fedhet: federated training when clients' data differ, as a Flower application.

import fedhet
run = fedhet.run(["method=scaffold", "plugin=[fednorm]", "rounds=5"])
run.summary["accuracy"], run.dir, run.weights
model = fedhet.load(run.dir)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedhet.api import load, run
    from fedhet.errors import ConfigError, DataError, RunFailed
    from fedhet.job import Run
    from fedhet.task import ClientData, Samples, Task

# Resolved when used: `import fedhet` stays instant, and a mistyped setting is told before torch is
# imported.
_HOME = {
    "run": "api",
    "load": "api",
    "Run": "job",
    "Task": "task",
    "ClientData": "task",
    "Samples": "task",
    "ConfigError": "errors",
    "DataError": "errors",
    "RunFailed": "errors",
}
__all__ = [
    "ClientData",
    "ConfigError",
    "DataError",
    "Run",
    "RunFailed",
    "Samples",
    "Task",
    "load",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fedhet' has no attribute {name!r}")
    return getattr(import_module(f"fedhet.{_HOME[name]}"), name)
