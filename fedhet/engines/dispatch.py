"""Runs a configuration in its engine."""

from __future__ import annotations

import importlib

from fedhet.core.errors import ConfigError, RunFailed, reason_of
from fedhet.core.task import Task
from fedhet.runs.config import Config
from fedhet.runs.job import Job, try_settings
from fedhet.runs.object_task import check_settings, check_task
from fedhet.runs.process import pinned_threads
from fedhet.runs.record import terminal
from fedhet.runs.record.outcome import Run, load_run

ENGINES = {"local": "in_process", "ray": "ray", "flwr": "flwr"}  # engine -> its module


def run_job(settings: Config, task: Task | None = None) -> Run:
    """Run a configuration in its engine.

    Args:
        settings: the composed configuration.
        task: replaces the configured dataset, partition and model.

    Raises:
        ConfigError: the settings contradict each other or the task; nothing was run.
        DataError: samples of the task are out of range; nothing was run.
        RunFailed: the run ended with status "failed".
    """
    name = settings.run.engine.name
    if task is not None and name != "local":
        raise ConfigError(
            f"engine={name} builds the task again in other processes; a Task given as objects needs"
            " engine=local"
        )
    if settings.run.deliver and name != "flwr":
        raise ConfigError(
            f"deliver=true with engine={name}: a simulation cannot deliver models, because it has"
            " no sites; its run folder has all models. To try delivery on this machine, use"
            " engine=flwr"
        )
    if task is not None:
        check_settings(settings)
    with pinned_threads(settings.run.engine.threads):
        job = Job(settings, task, name)
        if task is None:
            try_settings(settings)
        else:
            check_task(job.workspace)
        engine = importlib.import_module(f"fedhet.engines.{ENGINES[name]}")
        try:
            folder = engine.run(job)
        except Exception as error:
            if job.loop is None:
                raise  # a setting was wrong and no run has begun, or another process records it
            job.loop.end("failed", error)  # records failures outside of the run's steps, too
            raise RunFailed(reason_of(error), str(job.folder)) from error
    run = load_run(folder)
    terminal.print_summary(run.summary, run.dir)
    return run
