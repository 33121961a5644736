"""Planned runs, and their executors: in this process, in other processes, on Ray or on Slurm.

Executors for other processes can start a run, wait, and say whether its process has ended. The run
folder then says how the run ended.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import operator
import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

import psutil

from fedhet.core import check, interruptions, timing
from fedhet.core.errors import (
    ConfigError,
    DataError,
    OtherCode,
    RunFailed,
    WriteError,
    log,
    uncreatable,
)
from fedhet.core.interruptions import exits_as_errors, raise_if_interrupted
from fedhet.runs import process
from fedhet.runs.cli.exits import (
    INTERRUPTED,
    drop_output,
    error_line,
    interruptible,
    report_error,
    say,
)
from fedhet.runs.config import catalogue, composition
from fedhet.runs.config.composition import Config, Launching
from fedhet.runs.config.instantiation import instantiate
from fedhet.runs.config.lines import key_of
from fedhet.runs.process import SIGNALS, end_with_parent, signals_deferred
from fedhet.runs.record.schema import CELL_FILE, read_or_empty
from fedhet.study import folder as cells
from fedhet.study.live import Watch

if TYPE_CHECKING:
    from fedhet.runs.config.composition import Bases
    from fedhet.runs.record.outcome import Run

LOG = "log.txt"  # in a run folder: the output of its process
SILENT = f"its process ended without an error message; {LOG} in its folder may say why"


@dataclass(frozen=True)
class PlannedRun:
    """A run of a sweep or an experiment.

    Attributes:
        number: its number in the sweep.
        label: its name for people.
        overrides: its overrides.
        folder: absolute path of its run folder.
        any_code: whether the run may use code that differs from the code of the command that
            started the experiment; None if the run belongs to no experiment.
        trial: whether the run is a trial. The line for an ended trial shows its validation score
            instead of its test score, because nobody may choose a trial by its test score.
        alone: whether the process that it first shared with other runs has died. The run then gets
            a process of its own.
    """

    number: int
    label: str
    overrides: tuple[str, ...]
    folder: Path
    any_code: bool | None = None
    trial: bool = False
    alone: bool = field(default=False, compare=False)

    @property
    def name(self) -> str:
        """Its number and label, for people."""
        return f"job {self.number}: {self.label}"

    def prepare(self) -> None:
        """Create the run folder. In a plain sweep, remove the cell.json of an earlier attempt.

        Raises:
            ConfigError: the folder cannot be created.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise uncreatable("hydra.sweep.dir", self.folder, error) from error
        if self.any_code is None:
            (self.folder / CELL_FILE).unlink(missing_ok=True)

    def composed(self, bases: Bases) -> Config:
        """Compose its settings; `bases` caches parts that the runs of a sweep share."""
        return replace(composition.compose(self.overrides, bases=bases), run_dir=str(self.folder))

    def make(self, settings: Config) -> Run:
        """Execute the run with these settings in this process; raise its error if it fails."""
        if self.any_code is None:
            return make(cells.as_cell(settings, self.folder) if self.alone else settings)
        with cells.recorded(self.folder, any_code=self.any_code):
            return make(cells.as_cell(settings, self.folder))

    def ended(self, problem: str) -> bool:
        """Whether its folder says how the run has ended.

        Args:
            problem: why its process ended abnormally; "" if it did not.
        """
        state = cells.state_of(self.folder)
        if not state and self.any_code is None:
            summary = read_or_empty(self.folder / "summary.json")
            return summary.get("status") == "ok" if problem else "seconds" in summary
        if state.get("status") == cells.WAITING:
            return not problem and bool(state.get("reason"))  # the run has found other code
        return state.get("status") in (cells.FINISHED, cells.FAILED)

    def failure(self, problem: str) -> str | None:
        """Return why the run has failed, as its folder says. Its process must have ended.

        If the folder does not say how the run has ended, write the reason into the folder.

        Args:
            problem: why its process ended abnormally; "" if it did not.

        Returns:
            "" if the run has not failed. None if it has found other code and has not begun; the
            experiment reports this once for all runs.
        """
        if not self.ended(problem):
            problem = problem or SILENT
            try:
                cells.record_failure(self.folder, problem)
            except (DataError, WriteError) as error:
                log.warning("%s", error)
            return problem
        state = cells.state_of(self.folder)
        return None if state.get("status") == cells.WAITING else state.get("reason") or ""


@exits_as_errors()
def make(settings: Config) -> Run:
    """Execute a run in this process; raise its error if it fails."""
    instantiate(settings.cfg.partition)  # refuses wrong settings before torch and data are loaded
    if "fedhet.engines.dispatch" in sys.modules:
        # Reference cycles hold models and data of an earlier run; Python may keep them for long.
        gc.collect()
    else:
        with process.imports():
            import fedhet.engines.dispatch  # noqa: F401
    from fedhet.engines.dispatch import run_job
    from fedhet.runs.record import terminal

    terminal.log_to_stderr("fedhet.data")  # lists the files that were found or left out
    return run_job(settings)


def clients_together(settings: Config) -> int:
    """Return how many clients of such a run train in one batch; 0 if they train one by one."""
    if not settings.run.engine.may_fuse:
        return 0
    from fedhet.engines.fused.choice import together
    from fedhet.runs.job import Job

    try:
        with exits_as_errors():
            return together(Job(settings))
    except Exception:  # noqa: BLE001 -- the run itself reports its error
        return 0


def make_here(make_one: Callable[[Config], Run], settings: Config) -> Run | None:
    """Execute a run for the user of this process, and print its folder.

    After an error other than RunFailed, nothing is printed.

    Returns:
        The run; None if nobody reads its output any more (a closed pipe).
    """
    folder: Path | None = Path(settings.run_dir)
    try:
        run = make_one(settings)
        folder = run.dir
        return run
    except BrokenPipeError:
        drop_output()
        return None
    except Exception as error:
        folder = Path(error.folder) if isinstance(error, RunFailed) and error.folder else None
        raise
    finally:
        if folder is not None and folder.is_dir():
            say(f"run folder: {folder.resolve()}")


def carry_out(runs: Sequence[tuple[PlannedRun, Config]], home: str) -> None:
    """Execute the runs in this process, which was started for them on this or another machine.

    The run folders hold the outcome. Several runs are executed at the same time, so that their
    clients can train in one batch (fedhet/engines/fused).

    Args:
        runs: the runs and their settings.
        home: the working directory.

    Raises:
        ConfigError: the working directory does not exist on this machine.
    """
    try:
        os.chdir(home)
    except FileNotFoundError as error:
        raise ConfigError(
            f"the working directory {home} does not exist on a node: all nodes need it under the"
            " same path"
        ) from error
    first, settings = runs[0]
    with _logged(first.folder):
        if len(runs) == 1:
            _run_and_report(first, settings)
            return
        from fedhet.engines.fused.scheduler import Scheduler

        printed = cast("TextIO", OwnLog())
        threads = process.pinned_threads(settings.run.engine.threads)
        with redirect_stdout(printed), redirect_stderr(printed), threads:
            Scheduler().gather([partial(_beside_others, *run) for run in runs])


def _run_and_report(run: PlannedRun, settings: Config) -> None:
    """Execute a run. If it fails, print the error and record the reason in its folder."""
    try:
        run.make(settings)
    except OtherCode:
        pass  # the folder has the reason
    except Exception as error:  # noqa: BLE001 -- the command that started the run reports it
        report_error(error)
        cells.record_failure(run.folder, error_line(error))


def _beside_others(run: PlannedRun, settings: Config) -> None:
    """Execute a run in a process that it shares with other runs."""
    timing.SHARE.set(timing.Share())
    with (run.folder / LOG).open("a", encoding="utf-8") as file:
        OWN_LOG.set(file)
        _run_and_report(run, settings)


OWN_LOG: ContextVar[TextIO] = ContextVar("log")


class OwnLog:
    """Replaces stdout and stderr in a process with several runs: each writes to its own log."""

    def __getattr__(self, name: str) -> Any:
        return getattr(OWN_LOG.get(sys.__stderr__), name)  # type: ignore[arg-type]


@contextmanager
def _logged(folder: Path) -> Iterator[None]:
    """Redirect the output of this process and its children to the log of a run folder."""
    before = os.dup(1), os.dup(2)
    target = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        _redirect(target, target)
        yield
    finally:
        _redirect(*before)
        for number in (*before, target):
            os.close(number)


def _redirect(out: int, err: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(out, 1)
    os.dup2(err, 2)


# ---- executors
CGROUP = Path("/sys/fs/cgroup")
PRELOAD = "fedhet.study.preload"
# Runs may share a process only if they have the same values of these settings, and the same choice
# in every group except `partition`.
SHARED_SETTINGS = (
    "engine.",
    "model.",
    "client.batch_size",
    "fraction",
    "partition.clients",
    "replies.",
)
MOST_RUNS = 10  # in one process; if it is killed, each run is repeated in its own process
LISTEN_SECONDS = 0.25  # longest wait before the display is updated and interrupts are checked
END_SECONDS = 20.0  # time for interrupted runs to write their record before they are killed


class Executor(ABC):
    """Executes planned runs.

    Attributes:
        places: the largest number of processes at once.
        reads_here: whether all runs certainly read their data on this machine.
    """

    places = sys.maxsize
    reads_here = False

    @cached_property
    def bases(self) -> Bases:
        """Composes the settings of all runs; it reads the files of each choice once."""
        return composition.of_sweep()

    @abstractmethod
    def launch(self, runs: Sequence[PlannedRun], watch: Watch) -> dict[PlannedRun, str]:
        """Execute the runs. Return the failed runs with their reasons.

        A failed run does not stop the others. If a run finds that the code has changed, no more
        runs are started.

        Args:
            runs: the runs.
            watch: shows their progress.

        Raises:
            ConfigError: a setting of the launcher is wrong, or a run folder cannot be created.
        """


class Here(Executor):
    """Executes one run after another in this process."""

    places = 1
    reads_here = True

    def launch(self, runs: Sequence[PlannedRun], watch: Watch) -> dict[PlannedRun, str]:
        failed = {}
        watch.bar.live.stop()  # each run shows its own progress
        for run in runs:
            watch.begins(run)
            say(run.name)
            try:
                make_here(run.make, run.composed(self.bases))
            except OtherCode:
                break
            except Exception as error:  # noqa: BLE001 -- the other runs continue
                report_error(error)
                failed[run] = error_line(error)
            watch.ends(run, failed.get(run, ""))
        return failed


class Elsewhere(Executor):
    """Base of executors that execute runs in other processes, several at once."""

    @abstractmethod
    def start(self, calls: Sequence[Callable[[], None]]) -> list[Any]:
        """Call each function in its own process; return one handle per process."""

    @abstractmethod
    def wait(self, handles: Sequence[Any]) -> None:
        """Wait until one of the processes has ended, but at most `LISTEN_SECONDS`."""

    @abstractmethod
    def ended(self, handle: Any) -> str | None:
        """Return None while the process runs; then why it ended abnormally, or "" if it did not."""

    @abstractmethod
    def interrupt(self, handle: Any) -> None:
        """Ask the process to end as it does after Ctrl-C."""

    def kill(self, handle: Any) -> None:
        """End the process at once, if the executor can do this."""

    def together(self, runs: Sequence[PlannedRun], bases: Bases) -> list[list[PlannedRun]]:
        """Group the runs. Each group is executed by one process."""
        return [[run] for run in runs]

    def launch(self, runs: Sequence[PlannedRun], watch: Watch) -> dict[PlannedRun, str]:
        waiting = deque(self.together(runs, self.bases))
        composed: deque[tuple[list[PlannedRun], Callable[[], None]]] = deque()
        running: dict[Any, list[PlannedRun]] = {}
        failed = {}
        try:
            while waiting or composed or running:
                free = self.places - len(running)
                while waiting and len(composed) < free:
                    composed.append(self._composed(waiting.popleft()))
                if batch := [composed.popleft() for _ in range(min(free, len(composed)))]:
                    groups, calls = zip(*batch, strict=True)
                    for run in chain(*groups):
                        run.prepare()
                        watch.begins(run)
                    # An interrupt in between would leave started runs out of `running`.
                    with signals_deferred():
                        running |= zip(self.start(calls), groups, strict=True)
                if waiting and not composed:  # the next group is composed while others run
                    composed.append(self._composed(waiting.popleft()))
                self.wait([*running])
                for handle, group in [*running.items()]:
                    problem = self.ended(handle)
                    if problem is None:
                        continue
                    del running[handle]
                    left = [run for run in group if not run.ended(problem)]
                    if len(group) > 1 and left:
                        waiting.extend([replace(run, alone=True)] for run in left)
                        watch.tell(
                            f"{len(left)} runs are repeated, each in its own process:"
                            f" {problem or SILENT}"
                        )
                        group = [run for run in group if run not in left]
                    for run in group:
                        reason = run.failure(problem)
                        if reason is None:
                            waiting.clear()
                            composed.clear()
                            continue
                        watch.ends(run, reason)
                        if reason:
                            failed[run] = reason
                watch.look()
                raise_if_interrupted()
        except BaseException:
            self._end([*running])
            raise
        return {run: failed[run] for run in runs if run in failed}

    def _composed(self, group: list[PlannedRun]) -> tuple[list[PlannedRun], Callable[[], None]]:
        """Return a group with the function that executes its runs."""
        settings = [(run, run.composed(self.bases)) for run in group]
        return group, partial(carry_out, settings, str(Path.cwd()))

    def _end(self, handles: list[Any]) -> None:
        """Interrupt all runs, as Ctrl-C does.

        After END_SECONDS, or at a second Ctrl-C, kill the runs that have not ended.
        """
        until = time.monotonic() + END_SECONDS
        try:
            for handle in handles:
                self.interrupt(handle)
            while handles and time.monotonic() < until:
                self.wait(handles)
                handles = [handle for handle in handles if self.ended(handle) is None]
        finally:
            for handle in handles:
                self.kill(handle)


class Processes(Elsewhere):
    """Executes runs in processes on this machine; by default, as many at once as there are cores.

    A process has one run, or several runs that can train in one batch. The fork server of
    multiprocessing forks the processes; it has already imported the modules that runs need.

    Args:
        workers: number of processes at once; None: the number of cores that this process may use.
    """

    reads_here = True

    def __init__(self, workers: int | None = None) -> None:
        if "forkserver" not in multiprocessing.get_all_start_methods():
            raise ConfigError(
                "hydra/launcher=processes: this system cannot fork processes; use"
                " hydra/launcher=basic"
            )
        given = usable_cores() if workers is None else workers
        self.places = check.integer("hydra.launcher.workers", given, low=1)
        forkserver.set_forkserver_preload([PRELOAD])
        # Before Python 3.11.10, the fork server does not search `sys.path` for modules to preload.
        path = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        try:
            # This call unblocks all signals, so it must come before they are blocked.
            resource_tracker.ensure_running()
            with signals_deferred():  # the fork server then keeps these signals blocked
                forkserver.ensure_running()
        finally:
            del os.environ["PYTHONPATH"]
            os.environ.update({} if path is None else {"PYTHONPATH": path})

    def together(self, runs: Sequence[PlannedRun], bases: Bases) -> list[list[PlannedRun]]:
        # Runs are alike if they may share a process, as SHARED_SETTINGS says.
        alike: dict[tuple[str, ...], list[PlannedRun]] = {}
        shaping = catalogue.groups().keys() - {"partition"}
        for run in runs:
            lines = [line for line in run.overrides if key_of(line) in shaping]
            lines += [line for line in run.overrides if key_of(line).startswith(SHARED_SETTINGS)]
            alike.setdefault(tuple(lines), []).append(run)
        groups = []
        for some in alike.values():
            fuses = len(some) > 1 and clients_together(some[0].composed(bases))
            size = min(MOST_RUNS, math.ceil(len(some) / self.places)) if fuses else 1
            groups += [some[i : i + size] for i in range(0, len(some), size)]
        return groups

    def start(self, calls: Sequence[Callable[[], None]]) -> list[ForkServerProcess]:
        handles = []
        for call in calls:
            process = multiprocessing.get_context("forkserver").Process(
                target=_in_process, args=(call, dict(os.environ))
            )
            with suppress(OSError, EOFError):  # `ended` reports that there is no process
                process.start()
            handles.append(process)
        return handles

    def wait(self, handles: Sequence[ForkServerProcess]) -> None:
        connection.wait([each.sentinel for each in handles if each.pid], LISTEN_SECONDS)

    def ended(self, handle: ForkServerProcess) -> str | None:
        if handle.pid is None:
            return "the system cannot start a process for this run"
        code = handle.exitcode
        if not code:
            return None if code is None else ""
        if code > 0:
            return f"its process ended with exit code {code}; {LOG} in its folder may say why"
        name = signal.Signals(-code).name if -code in {*signal.Signals} else f"signal {-code}"
        more = " (the system does so if memory runs out)" if -code == signal.SIGKILL else ""
        return f"its process was ended by {name}{more}"

    def interrupt(self, handle: ForkServerProcess) -> None:
        if handle.pid and handle.is_alive():
            os.kill(handle.pid, signal.SIGTERM)

    def kill(self, handle: ForkServerProcess) -> None:
        if handle.pid:
            handle.kill()


def _in_process(call: Callable[[], None], variables: dict[str, str]) -> None:
    """Run `call` in a new process on this machine, with these environment variables."""
    # The command handles Ctrl-C, and sends SIGTERM once.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(variables)
    try:
        with interruptible():
            signal.signal(signal.SIGTERM, _interrupt_once)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            end_with_parent(os.getppid())  # the parent, the fork server, ends with the command
            command = multiprocessing.parent_process()
            if command is not None and not command.is_alive():
                os._exit(1)
            call()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _interrupt_once(number: int, frame: Any) -> None:
    """Handle a signal like Ctrl-C.

    Ignore a second signal: it would interrupt the run while it writes its record.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    interruptions.interrupt(number, frame)


def usable_cores() -> int:
    """Return the number of cores for this process, by its affinity and its container's limit."""
    cores = len(psutil.Process().cpu_affinity()) if sys.platform == "linux" else os.cpu_count() or 1
    for quota, period in (("cpu.max", ""), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with suppress(OSError, ValueError):  # there is no limit, or the limit is "max"
            words = (CGROUP / quota).read_text().split()
            words += (CGROUP / period).read_text().split() if period else []
            if int(words[0]) > 0:
                cores = min(cores, math.ceil(int(words[0]) / int(words[1])))
    return max(1, cores)


class Ray(Elsewhere):
    """Executes each run as a task of a Ray cluster.

    Ray sends the code of this process to the nodes (engines/ray.py). Each run gets its composed
    configuration. All nodes need the same packages. They also need the working directory under the
    same path, because each run writes its own run folder.

    Args:
        address: `<host>:<port>` of a cluster's head; "auto": the cluster of this machine; None:
            start a cluster on this machine.
        num_cpus: cores that Ray reserves for a run.
        num_gpus: GPUs, or a fraction of a GPU, that Ray reserves for a run.
    """

    def __init__(
        self, address: str | None = "auto", num_cpus: float = 1, num_gpus: float = 0
    ) -> None:
        check.number("hydra.launcher.num_cpus", num_cpus, open_low=0)
        check.number("hydra.launcher.num_gpus", num_gpus, low=0)
        self.address = address
        self.needs = {"num_cpus": num_cpus, "num_gpus": num_gpus}

    def launch(self, runs: Sequence[PlannedRun], watch: Watch) -> dict[PlannedRun, str]:
        import ray

        from fedhet.engines.ray import check_resources, ray_arguments

        if self.address is not None:
            check_resources(self.address, "hydra.launcher", self.needs)
        self.ray = ray
        handler = signal.getsignal(signal.SIGTERM)
        with ray_arguments(self.address) as arguments:
            try:
                ray.init(**arguments, log_to_driver=False)
                signal.signal(signal.SIGTERM, handler)  # Ray has replaced the handler
                return super().launch(runs, watch)
            finally:
                ray.shutdown()  # by disconnecting, this ends the runs that have not finished

    def start(self, calls: Sequence[Callable[[], None]]) -> list[Any]:
        task: Any = self.ray.remote(lambda call: call()).options(**self.needs, max_retries=0)
        return [task.remote(call) for call in calls]

    def wait(self, handles: Sequence[Any]) -> None:
        self.ray.wait([*handles], timeout=LISTEN_SECONDS)

    def ended(self, handle: Any) -> str | None:
        if not self.ray.wait([handle], timeout=0)[0]:
            return None
        try:
            self.ray.get(handle)
        except self.ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            first = str(cause).strip().partition("\n")[0]
            return f"its Ray task failed: {type(cause).__name__}: {first}"
        return ""

    def interrupt(self, handle: Any) -> None:
        self.ray.cancel(handle)


class Submitit(Elsewhere):
    """Executes each run as a job of Slurm, or as a local process of submitit.

    Args:
        cluster: slurm, or local for processes of this machine.
        submitit_folder: the folder for submitit's logs.
        max_num_timeout: how often Slurm may restart a run after a timeout.
        settings: settings of `submitit.AutoExecutor`.
    """

    def __init__(
        self, cluster: str, submitit_folder: str, max_num_timeout: int = 0, **settings: Any
    ) -> None:
        import submitit

        first = {"slurm_max_num_timeout": max_num_timeout} if cluster == "slurm" else {}
        self.executor = submitit.AutoExecutor(submitit_folder, cluster=cluster, **first)
        self.executor.update_parameters(
            **{f"{cluster}_{name}": value for name, value in settings.items()}
        )

    def start(self, calls: Sequence[Callable[[], None]]) -> list[Any]:
        return self.executor.map_array(operator.call, calls)

    def wait(self, handles: Sequence[Any]) -> None:
        time.sleep(LISTEN_SECONDS)

    def ended(self, handle: Any) -> str | None:
        if not handle.done():
            return None
        error = handle.exception()
        return "" if error is None else str(error).strip().splitlines()[-1]

    def interrupt(self, handle: Any) -> None:
        handle.cancel()


EXECUTORS: dict[str, Callable[..., Executor]] = {
    "basic": Here,
    "processes": Processes,
    "ray": Ray,
    "submitit_local": partial(Submitit, "local"),
    "submitit_slurm": partial(Submitit, "slurm"),
}


def executor(launching: Launching) -> Executor:
    """Return the executor that hydra/launcher chooses.

    Raises:
        ConfigError: there is no such launcher, or it does not have these settings.
    """
    check.one_of("hydra/launcher", launching.launcher, EXECUTORS)
    try:
        return EXECUTORS[launching.launcher](**launching.settings)
    except TypeError as error:
        raise ConfigError(f"hydra/launcher={launching.launcher}: {error}") from error
