"""A run on the task of an app's owner: from its settings to its objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedhet.core.errors import ConfigError
from fedhet.core.limits import UNLIMITED, Limits
from fedhet.core.task import PARTS, Task
from fedhet.flower.nodes import PLACE
from fedhet.runs.config import Config, cached
from fedhet.runs.config.lines import key_of
from fedhet.runs.given import check_settings, check_task
from fedhet.runs.job import Job


def lines_of(method: str, plugins: Sequence[str], overrides: Sequence[str]) -> tuple[str, ...]:
    """The settings of a run as overrides.

    Raises:
        ConfigError: a text stands for a list, or the method or the plug-ins are given twice.
    """
    for name, given in (("plugins", plugins), ("overrides", overrides)):
        if isinstance(given, str):
            raise ConfigError(f"{name}={given!r} is a text; expected a list of texts")
    twice = {"method": method, **({"plugin": list(plugins)} if plugins else {})}
    for line in overrides:
        if (key := key_of(line)) in twice:
            raise ConfigError(
                f"the strategy was made with {key}={twice[key]!r}, and its overrides have {line}:"
                " leave one out"
            )
    chosen = [f"method={method}", *([f"plugin=[{','.join(plugins)}]"] if plugins else [])]
    return (*chosen, *overrides)


def settings_of(lines: tuple[str, ...]) -> Config:
    """The settings of a run on a task of its own.

    Raises:
        ConfigError: one of the overrides is wrong, or has no effect with a task.
    """
    settings = cached(lines)
    check_settings(settings)
    return settings


def job_of(settings: Config, task: Task, limits: Limits = UNLIMITED) -> Job:
    """The objects of the run.

    Args:
        settings: the run's.
        task: what is learned.
        limits: what the node of this process allows.

    Raises:
        ConfigError: the settings do not fit together, or not the task.
    """
    job = Job(settings, task, "flwr", limits=limits)  # its clients may be real ones
    check_task(job.workspace)
    return job


def told_of(job: Job, place: dict[str, int]) -> dict[str, Any]:
    """What a node tells: where it is in the order of the clients, and its client's samples."""
    sizes = job.task.part_sizes[place[PLACE[0]]]
    return {**place, **dict(zip(PARTS, sizes, strict=True))}
