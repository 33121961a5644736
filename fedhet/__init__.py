"""fedhet: federated learning on non-IID clients, as a Flower application.

import fedhet

run = fedhet.run(["method=scaffold", "plugin=[fednorm]", "rounds=5"])
run.summary["accuracy"], run.dir, run.weights
model = fedhet.load(run)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedhet.api import run
    from fedhet.core.errors import ConfigError, DataError, RunFailed
    from fedhet.core.task import ClientData, Samples, Task
    from fedhet.runs.record.outcome import Run, load, load_run
    from fedhet.study import report
    from fedhet.study.report.results import results

# Names are resolved on first use. So `import fedhet` takes no time, and a misspelled setting is
# reported before torch is imported.
_MODULES = {
    "run": "fedhet.api",
    "load": "fedhet.runs.record.outcome",
    "load_run": "fedhet.runs.record.outcome",
    "results": "fedhet.study.report.results",
    "Run": "fedhet.runs.record.outcome",
    "Task": "fedhet.core.task",
    "ClientData": "fedhet.core.task",
    "Samples": "fedhet.core.task",
    "ConfigError": "fedhet.core.errors",
    "DataError": "fedhet.core.errors",
    "RunFailed": "fedhet.core.errors",
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
    "load_run",
    "report",
    "results",
    "run",
]


def __getattr__(name: str) -> Any:
    if name == "report":
        return import_module("fedhet.study.report")
    if name == "__version__":
        return import_module("importlib.metadata").version("fedhet")
    if name not in _MODULES:
        raise AttributeError(f"module 'fedhet' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
