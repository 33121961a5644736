"""The function `run`: the application from Python and notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedhet.runs import config

if TYPE_CHECKING:
    from fedhet.core.task import Task
    from fedhet.runs.record.outcome import Run


def run(overrides: Sequence[str] = (), *, task: Task | None = None) -> Run:
    """Do the same as `python -m fedhet <overrides>`.

    Args:
        overrides: the settings, such as `["method=scaffold", "rounds=5"]`.
        task: replaces dataset, partition and model; settings of these are refused.

    Raises:
        ConfigError: a setting is unknown or out of range, or the task's parts do not fit together;
            nothing was run.
        DataError: data or samples of the task are missing or damaged; nothing was run.
        RunFailed: the run ended with status "failed"; `error.folder` holds its record.
    """
    # Before torch is imported, so that a wrong setting is reported immediately.
    settings = config.compose(overrides)
    from fedhet.runs.config import experiment_file

    experiment_file.refuse(overrides)
    from fedhet.engines.dispatch import run_job

    return run_job(settings, task)
