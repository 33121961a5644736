"""Which plug-ins can be combined with which methods, for `--list`."""

from __future__ import annotations

from copy import deepcopy

from fedhet import config
from fedhet.config import catalogue
from fedhet.data.toy import toy_task
from fedhet.errors import ConfigError
from fedhet.job import Job, quiet


def compatibility() -> list[tuple[str, str, str | None]]:
    """Return (method, plug-in, reason why they cannot be combined, or None) for every pair.

    Each pair is built on a toy task, so the answer is that of the code itself.
    """
    rows: list[tuple[str, str, str | None]] = []
    names = catalogue.choices("plugin")
    plugins = Job(config.compose(["method=fedavg", f"plugin=[{','.join(names)}]"])).plugins()
    for method in catalogue.choices("method"):
        job = Job(config.compose([f"method={method}"]), toy_task())
        for plugin in plugins:
            own = [each for each in job.plugins() if each.name != plugin.name]
            try:
                with quiet():
                    job.strategy_with([*own, deepcopy(plugin)])
                rows.append((method, plugin.name, None))
            except ConfigError as error:
                rows.append((method, plugin.name, str(error)))
    return rows
