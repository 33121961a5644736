"""Checks the overrides before torch is imported, then lets Hydra run the job or the sweep."""

from __future__ import annotations

import gc
import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobStatus
from hydra.types import RunMode

from fedhet import process
from fedhet.cli.errors import DEGRADED, FAILED, drop_output, report_error, say

# Composition by name: a launcher's process, which unpickles HydraTask, needs its resolvers.
from fedhet.config import catalogue, composition, resuming
from fedhet.config.targets import instantiate
from fedhet.core.errors import ConfigError, OtherCode, RunFailed, uncreatable
from fedhet.experiment import folder as cell_folder

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from omegaconf import DictConfig

    from fedhet.config import Config
    from fedhet.experiment.code import Code
    from fedhet.experiment.definition import Experiment
    from fedhet.experiment.progress import Outcome
    from fedhet.record.results import Run

NAN = float("nan")
DEGRADED_LINE = "it has lost a larger share of its replies than replies.max_lost allows"


def launch(overrides: list[str], flags: list[str], *, sweep: bool) -> int:
    """Run one job, or every job of a sweep, and return the exit code.

    Args:
        overrides: the overrides of the command line.
        flags: its other arguments, which Hydra reads.
        sweep: whether the overrides may give several values.

    Raises:
        ConfigError: an override is wrong; nothing was run.
    """
    if resuming.is_resumption(overrides):
        if sweep or flags:
            raise ConfigError(
                f"{' '.join(flags)} with resume=...: it continues a single run as it was set up"
            )
        return resume(overrides)
    if sweep:
        warm(overrides)
    checked = composition.check_overrides(overrides, sweep=sweep)
    overrides = [composition.named_by_what_varies(overrides), *checked] if sweep else checked
    task = HydraTask()
    apply_hydra(task, flags, overrides, setting="hydra.sweep.dir" if sweep else "hydra.run.dir")
    if sweep:
        for failure in task.failures:
            print(f"failed: {failure}", file=sys.stderr)  # the reason was printed when it failed
        if task.sweep is not None:
            say(f"to compare the runs: python -m fedhet report {shlex.quote(str(task.sweep))}")
    code = FAILED if sweep and task.failures else task.code
    return code or (DEGRADED if task.degraded else 0)


def warm(overrides: list[str]) -> None:
    """Have the process that starts the runs import, while they are checked, if there is one."""
    if "hydra/launcher=processes" in overrides:
        from fedhet.launchers import processes

        processes.warm()


def apply_hydra(task: HydraTask, flags: list[str], overrides: list[str], *, setting: str) -> None:
    """Let Hydra call the task for each job.

    Args:
        task: the function to call.
        flags: the arguments that are no overrides.
        overrides: the checked overrides.
        setting: the setting that names the folder which Hydra creates.
    """
    sys.argv = ["fedhet", *flags, *overrides]  # Hydra reads them from there
    # Hydra raises errors; without this variable it prints a traceback and calls sys.exit.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    application = hydra.main(
        version_base=composition.HYDRA_VERSION,
        config_path=str(catalogue.CONF),
        config_name="config",
    )
    try:
        application(task)()
    except OSError as error:
        if error.filename is None:  # it does not come from Hydra, which creates the run folder
            raise
        raise uncreatable(setting, error.filename, error) from error
    except Exception as error:
        if error not in task.heard_of:  # Hydra's sweeper raises the first one of a batch again
            raise
    finally:
        GlobalHydra.instance().clear()


def resume(overrides: list[str]) -> int:
    """Go on with the run that `resume=<run folder>` names, and return the exit code.

    Hydra would compose the run's settings, but not those that it began with.
    """
    settings = composition.compose(overrides)
    try:
        return DEGRADED if _is_degraded(_run(settings), f"resume={settings.run_dir}") else 0
    except BrokenPipeError:  # the run is complete
        drop_output()
        return 0
    finally:
        say(f"run folder: {settings.run_dir}")


def _run(settings: Config) -> Run:
    instantiate(settings.cfg.partition)  # refuses its settings before torch and data are loaded
    _prepare_process()
    from fedhet.job import run_job
    from fedhet.record import terminal

    terminal.log_to_stderr("fedhet.data")  # which files were found or left out
    return run_job(settings)


def _is_degraded(run: Run, name: str) -> bool:
    degraded = bool(run.summary.get("degraded"))
    if degraded:
        print(f"degraded: {name}: {DEGRADED_LINE}", file=sys.stderr)
    return degraded


class HydraTask:
    """The function that Hydra calls for each job.

    A job that fails is reported and noted, so that the other jobs of a sweep still run. In another
    process, where a launcher may run the job, the exception is raised again: a note would be lost
    with that process.

    Attributes:
        code: the exit code of the last job that failed, else 0.
        failures: the names of the jobs that failed.
        degraded: whether a job has lost more replies than it was allowed.
        experiment: the experiment to which the jobs belong, or None.
        made_by: the code with which it began.
        started: its folder, as soon as it has one.
        outcome: what has become of it, at its end.
        sweep: the folder of the sweep, as soon as one of its jobs has ended well.
        heard_of: the errors of jobs that a launcher has run in other processes.
    """

    def __init__(self, experiment: Experiment | None = None, made_by: Code | None = None) -> None:
        self.experiment = experiment
        self.made_by = made_by
        self.started: Path | None = None
        self.outcome: Outcome | None = None
        self.pid = os.getpid()
        self.code = 0
        self.failures: list[str] = []
        self.degraded = False
        self.sweep: Path | None = None
        self.heard_of: list[Exception] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "pid": 0}  # whoever unpickles it is another process

    def heard(self, name: str, job: JobReturn, folder: Path | None) -> None:
        """Note how a job has ended that a launcher has run in another process."""
        if job.status == JobStatus.FAILED:
            self.heard_of.append(job._return_value)
            self.failures.append(name)
        elif folder is not None:
            self.sweep = folder.parent
            summary = json.loads((folder / "summary.json").read_text())
            if summary.get("degraded"):
                self.degraded = True
                print(f"degraded: {name}: {DEGRADED_LINE}", file=sys.stderr)

    def __call__(self, cfg: DictConfig) -> float:
        """Run the job and return its best validation accuracy.

        The value is for the optimiser of a sweep, which must not see the test data. It is NaN if
        the job failed or no client has validation data.
        """
        hydra_config = HydraConfig.get()
        output_dir = Path(hydra_config.runtime.output_dir)
        folder: Path | None = output_dir
        name = composition.job_label(hydra_config)
        if hydra_config.mode == RunMode.MULTIRUN:
            name = f"job {hydra_config.job.num}: {name}"
            say(name)
        try:
            settings = composition.from_hydra_job(cfg)
            if resuming.is_cell(output_dir):
                keep = self.experiment is None or self.experiment.on_other_code == "keep"
                with cell_folder.recorded(output_dir, any_code=keep):
                    run = _run(cell_folder.as_cell(settings, output_dir))
            else:
                run = _run(settings)
            folder = run.dir
            if hydra_config.mode == RunMode.MULTIRUN:
                self.sweep = output_dir.parent
            self.degraded |= _is_degraded(run, name)
            validation = run.summary["validation"]
            return NAN if validation is None else float(validation)
        except BrokenPipeError:  # the run is complete, and a sweep goes on
            drop_output()
            return NAN
        except OtherCode:
            folder = None
            if os.getpid() != self.pid:
                raise
            return NAN  # as all that follow: the experiment tells it once
        except Exception as error:
            folder = Path(error.folder) if isinstance(error, RunFailed) and error.folder else None
            if os.getpid() != self.pid:
                raise
            self.code = report_error(error)
            self.failures.append(name)
            return NAN
        finally:
            # Hydra creates the folder even for a job that never began.
            if not any(output_dir.iterdir()):
                output_dir.rmdir()
            if folder is not None and folder.is_dir():
                say(f"run folder: {folder.resolve()}")


def _prepare_process() -> None:
    """Import what a job needs; later in a sweep, free the memory of the previous job.

    Its models and data are in reference cycles, which Python may keep for a long time.
    """
    if "fedhet.job" in sys.modules:
        gc.collect()
        return
    with process.imports():
        import fedhet.job  # noqa: F401
