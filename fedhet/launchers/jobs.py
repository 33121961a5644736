"""The jobs of a batch: what their processes need, what such a process does, and how it has ended.

A job is one run. Its process takes nothing from another one: it composes the run's configuration as
Hydra's own launcher does, so the bytes of a run do not depend on where and when it runs.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import hydra.version
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import (
    JobReturn,
    JobRuntime,
    JobStatus,
    filter_overrides,
    run_job,
    setup_globals,
)
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from fedhet.cli.errors import error_line, report_error
from fedhet.config import composition
from fedhet.config.bases import Bases
from fedhet.core.errors import ConfigError, DataError, OtherCode, RunFailed, WriteError, uncreatable
from fedhet.experiment.folder import record_failure

log = logging.getLogger("fedhet")
LOG = "log.txt"  # in a run folder: what its process has printed
_TRAVELS = (ConfigError, OtherCode, DataError, WriteError, RunFailed)


@dataclass
class JobBatch:
    """What the process of a job needs beside its overrides; it can be pickled.

    Attributes:
        context: Hydra's loader of configurations and its callbacks.
        task: the function that Hydra calls for a job.
        config: the configuration of the sweep.
        folder: the working directory.
        variables: the environment variables.
    """

    context: HydraContext
    task: TaskFunction
    config: DictConfig
    folder: str
    variables: dict[str, str]

    def prepare(self) -> None:
        """Set this process up for jobs of the batch."""
        os.chdir(self.folder)
        os.environ.update(self.variables)
        # Hydra's state, of which not all can be pickled.
        hydra.version.setbase(composition.HYDRA_VERSION)
        JobRuntime.instance().set("name", self.config.hydra.job.name)
        Plugins.instance()
        setup_globals()

    @cached_property
    def bases(self) -> Bases:
        """What composes the configurations, and is faster for those after the first."""
        return Bases(partial(self.context.config_loader.load_sweep_config, self.config))

    def compose(self, number: int, overrides: Sequence[str]) -> DictConfig:
        """Compose the configuration of a job."""
        cfg = self.bases(overrides)
        OmegaConf.copy_cache(from_config=self.config, to_config=cfg)
        with open_dict(cfg):
            cfg.hydra.job.id = number
            cfg.hydra.job.num = number
        return cfg

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "bases"}

    def folder_of(self, cfg: DictConfig) -> Path:
        """The run folder of a job."""
        HydraConfig.instance().set_config(cfg)
        parts = (OmegaConf.select(cfg, f"hydra.sweep.{key}") for key in ("dir", "subdir"))
        return Path(self.folder, *map(str, parts))

    def run(
        self,
        number: int,
        overrides: Sequence[str],
        begins: Callable[[Path], None],
        cfg: DictConfig | None = None,
    ) -> JobReturn:
        """Run a job in this process.

        Args:
            number: the job's, in the sweep.
            overrides: the job's.
            begins: called with the run folder, which exists then.
            cfg: its configuration, if it is composed.
        """
        failed = JobReturn(overrides=filter_overrides(overrides), status=JobStatus.FAILED)
        try:
            cfg = cfg or self.compose(number, overrides)
            folder = self.folder_of(cfg)
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise uncreatable("hydra.sweep.dir", folder, error) from error
            begins(folder)
            done = run_job(
                hydra_context=self.context,
                task_function=self.task,
                config=cfg,
                job_dir_key="hydra.sweep.dir",
                job_subdir_key="hydra.sweep.subdir",
            )
        except Exception as error:  # noqa: BLE001 -- of Hydra, or its callbacks
            failed.return_value = error
            done = failed
        if done.status == JobStatus.FAILED:
            report_error(done._return_value)
            done.return_value = as_ours(done._return_value)
        return done


def as_ours(error: Exception) -> Exception:
    """The error in a form that every process can read."""
    if type(error) in _TRAVELS:
        return error
    return DataError(str(error)) if isinstance(error, DataError) else RunFailed(error_line(error))


class FailedJob(JobReturn):
    """A job that has failed, which Hydra's own class would print when it is asked for its value."""

    @property  # type: ignore[misc]
    def return_value(self) -> Any:  # type: ignore[misc, override]
        """Nothing: the error is raised."""
        raise self._return_value


class Jobs:
    """A batch of jobs, as the process that launches them sees it.

    Args:
        context: Hydra's loader of configurations and its callbacks.
        task: the function that Hydra calls for a job. Its method `heard`, if it has one, is told
            how each job has ended.
        config: the configuration of the sweep.
        overrides: each job's.
        first: the number of the first job in the sweep.
    """

    def __init__(
        self,
        context: HydraContext,
        task: TaskFunction,
        config: DictConfig,
        overrides: Sequence[Sequence[str]],
        first: int,
    ) -> None:
        setup_globals()
        self.context = context
        self.task = task
        self.config = config
        self.overrides = overrides
        self.first = first
        self.folders: dict[int, Path] = {}  # position -> run folder, of those that have begun
        self.returns: dict[int, JobReturn] = {}

    def batch(self, variables: Mapping[str, str]) -> JobBatch:
        """What travels to the jobs' processes, with these environment variables."""
        return JobBatch(
            self.context,
            self.task,
            self.config,
            os.getcwd(),  # noqa: PTH109 -- a text
            dict(variables),
        )

    def __len__(self) -> int:
        return len(self.overrides)

    def label(self, position: int) -> str:
        """What a job overrides, for people."""
        return composition.job_label(self.config.hydra, filter_overrides(self.overrides[position]))

    def ended(self, position: int, done: JobReturn | None, problem: str = "") -> str | None:
        """Note how a job has ended, and return why it has failed, or "".

        None if it has found other code and has not begun, which the experiment tells for all.

        Args:
            position: the job's, in this batch.
            done: what its process has sent, or None if it has ended before.
            problem: why there is nothing from it.
        """
        folder = self.folders.get(position)
        if done is None:
            done = JobReturn(
                overrides=filter_overrides(self.overrides[position]), status=JobStatus.FAILED
            )
            done.return_value = RunFailed(problem, str(folder) if folder else None)
        failed = done.status == JobStatus.FAILED
        self.returns[position] = done = FailedJob(**vars(done)) if failed else done
        if failed and isinstance(done._return_value, OtherCode):
            return None
        reason = error_line(done._return_value) if failed else ""
        if failed:
            self._record(position, reason)
        return reason

    def _record(self, position: int, reason: str) -> None:
        """Let the run folder say why its run failed, where the run itself could not."""
        folder = self.folders.get(position)
        if folder is None:
            return
        try:
            record_failure(folder, reason)
        except (DataError, WriteError) as error:
            log.warning("%s", error)

    def results(self) -> list[JobReturn]:
        """How the jobs that were started have ended, in their order; the task is told so, too."""
        heard = getattr(self.task, "heard", None)
        every = sorted(self.returns.items())
        for position, done in every:
            name = f"job {self.first + position}: {self.label(position)}"
            if heard:
                heard(name, done, self.folders.get(position))
        return [done for _, done in every]


def why(code: int | None) -> str:
    """Why a process has ended before it said how its run did, in one line."""
    if code is None or code >= 0:
        return f"its process ended with exit code {code}; {LOG} in its folder may say why"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    more = " (as the system does where memory runs out)" if -code == signal.SIGKILL else ""
    return f"its process was ended by {name}{more}"


def redirect(folder: Path) -> None:
    """Let this process's stdout and stderr go on in the log of a run folder."""
    target = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)


@contextmanager
def redirected() -> Iterator[Callable[[Path], None]]:
    """Let stdout and stderr be as they were at the end of a block that calls `redirect`."""
    before = os.dup(1), os.dup(2)
    try:
        yield redirect
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, kept in enumerate(before, 1):
            os.dup2(kept, number)
            os.close(kept)
