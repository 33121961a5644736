"""Which plug-ins can be combined with which methods, for `--list`."""

from __future__ import annotations

from copy import deepcopy

from fedhet import config
from fedhet.config import catalogue
from fedhet.core.errors import ConfigError
from fedhet.core.plugin import Plugin
from fedhet.data.toy import toy_task
from fedhet.job import Job, quiet, strategy_of


def compatibility() -> list[tuple[str, str, str | None]]:
    """Return (method, plug-in, reason why they cannot be combined, or None) for every pair.

    Each pair is built on a toy task, so the answer is that of the code itself. A piece of one's own
    that cannot be built with its defaults is combined with nothing; the reason says why.
    """
    rows: list[tuple[str, str, str | None]] = []
    plugins = {name: _plugin(name) for name in catalogue.choices("plugin")}
    for method in catalogue.choices("method"):
        job = _job(method)
        rows += [(method, name, _reason(job, plugin)) for name, plugin in plugins.items()]
    return rows


def _plugin(name: str) -> Plugin | ConfigError:
    try:
        (plugin,) = Job(config.compose(["method=fedavg", f"plugin=[{name}]"])).plugins()
        return plugin
    except ConfigError as error:
        return error


def _job(method: str) -> Job | ConfigError:
    try:
        return Job(config.compose([f"method={method}"]), toy_task())
    except ConfigError as error:
        return error


def _reason(job: Job | ConfigError, plugin: Plugin | ConfigError) -> str | None:
    """Why the two cannot be combined; None where they can."""
    if isinstance(job, ConfigError):
        return str(job)
    if isinstance(plugin, ConfigError):
        return str(plugin)
    try:
        others = [each for each in job.plugins() if each.name != plugin.name]
        with quiet():
            strategy_of(job.config, job.workspace, [*others, deepcopy(plugin)])
    except ConfigError as error:
        return str(error)
    return None
