"""The application from Python and notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedhet.runs import config

if TYPE_CHECKING:
    from fedhet.core.task import Task
    from fedhet.runs.record.outcome import Run


def run(overrides: Sequence[str] = (), *, task: Task | None = None) -> Run:
    """Do what `python -m fedhet <overrides>` does.

    Args:
        overrides: the settings, such as `["method=scaffold", "rounds=5"]`.
        task: takes the place of dataset, partition and model; settings of these are refused.

    Raises:
        ConfigError: a setting is unknown or out of range, or the task's parts do not fit together;
            nothing was run.
        DataError: data are missing or damaged, or the task's samples are; nothing was run.
        RunFailed: the run ended with status "failed"; `error.folder` holds what it recorded.
    """
    # Before torch is imported, so that what is wrong is reported immediately.
    settings = config.compose(overrides)
    from fedhet.runs.config import experiment_file

    experiment_file.refuse(overrides)
    from fedhet.engines.dispatch import run_job

    return run_job(settings, task)
