"""Submits a run through `flwr run` to a SuperLink of its own on this machine.

`flwr run --stream` exits with 0 even if the run fails. It also leaves a daemon behind, and a later
run would get that daemon's environment. So each run has its own FLWR_HOME and ports, `flwr ls`
gives the status, and every started process is ended.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedhet.core.errors import SUBMITTED, ConfigError, RunFailed, printed
from fedhet.data.storage import LastingJson
from fedhet.runs import delivery
from fedhet.runs.config import components, sent
from fedhet.runs.config.catalogue import CONF
from fedhet.runs.flower_commands import BIN, flower_environment, listed
from fedhet.runs.guard import TemporaryFolder
from fedhet.runs.job import Job
from fedhet.runs.record.lock import LOCK, Lock
from fedhet.runs.record.schema import RUNNING, read_or_empty
from fedhet.runs.record.start import check_run

STATES = "states"  # folder in the run folder: the clients' states, while the run can be resumed
LOOK_SECONDS = 0.1  # between two looks at the run folder
LAST_LINES = 5  # the number of lines of Flower's output that an error message quotes
LAST_SECONDS = 1.0  # how long to wait for the log's last lines; the run folder has the results
SUPERLINK = '[superlink]\ndefault = "local"\n[superlink.local]\naddress = ":local:"\n'


def run(job: Job) -> Path:
    """Run the job. The server app gets the absolute path of the run folder, and writes the folder.

    Raises:
        ConfigError: a setting does not fit, or fedhet's source folder is missing.
        RunFailed: the run did not complete; the reason is the server app's or Flower's.
    """
    app = CONF.parent
    folder = Path(job.config.run_dir).resolve()
    if not (app / "pyproject.toml").exists():
        raise ConfigError(
            f"engine=flwr submits fedhet's source folder, but {app} is not one (it has no"
            " pyproject.toml): clone fedhet and run `pip install -e .` in the clone"
        )
    if (folder / "summary.json").exists() and not job.config.resumes:
        raise ConfigError(f"hydra.run.dir={folder}: that folder already has a run; name another")
    before = read_or_empty(folder / "summary.json")  # the summary of an earlier part of the run

    def recorded_end() -> dict[str, Any]:
        """Return the run's summary; {} if it does not say yet how the run has ended."""
        summary = read_or_empty(folder / "summary.json")
        return {} if summary == before or summary.get("reason") == RUNNING else summary

    def has_ended() -> bool:
        """Whether the server app has finished, including figures and a tracker's files."""
        return bool(recorded_end()) and not (folder / LOCK).exists()

    _ = job.strategy  # builds it, so that a wrong setting is reported here and not in a log
    if job.config.resumes:  # if the run cannot be resumed, this is reported here, too
        Lock(folder).release()
        check_run(folder, job.config.cfg, job.partition, given=False)
    with ExitStack() as stack:
        temporary = TemporaryFolder("fedhet-flwr-")
        home = Path(stack.enter_context(temporary))
        environment = {**_environment(home, folder), **temporary.environment}
        stack.enter_context(_interruption_recorded(folder))
        # Kill at once: Flower's and Ray's own shutdown takes up to a minute, and leaves processes.
        stack.callback(temporary.end_processes)
        (home / "config.toml").write_text(SUPERLINK)
        sent.save(replace(job.config, run_dir=str(folder)), Path(environment[SUBMITTED]))
        command = ["run", str(app), "local", "--stream", "--federation-config", _resources(job)]
        run_id = _submit(command, environment, has_ended, temporary.end_processes)
        if not (end := recorded_end()):
            runs = listed(home, "runs", "ls", "local", variables=environment)
            states = {run["run-id"]: f"{run['status']}: {run['status-details']}" for run in runs}
            end = {"reason": f"Flower reports {states.get(run_id, 'unknown')}"}
    if end.get("status") != "ok":
        raise RunFailed(end["reason"], str(folder))
    if not (folder / "checkpoints").exists():  # the run cannot be resumed
        shutil.rmtree(folder / STATES, ignore_errors=True)
    return folder


# ---- Flower's options and environment
def _resources(job: Job) -> str:
    """Return Flower's options for the number of nodes, and the CPUs and GPUs of each client."""
    engine = job.config.run.engine
    if engine.num_cpus != int(engine.num_cpus):
        raise ConfigError(
            f"engine.num_cpus={engine.num_cpus}: `flwr run` needs a whole number of CPUs per client"
        )
    return (
        f"num-supernodes={engine.workers or len(job.task.sizes)}"
        f" client-resources-num-cpus={int(engine.num_cpus)}"
        f" client-resources-num-gpus={float(engine.num_gpus)}"
    )


def _environment(home: Path, folder: Path) -> dict[str, str]:
    """Return the environment of Flower's commands: its own home and ports, without online calls."""
    with socket.socket() as http_socket, socket.socket() as control_socket:
        http_socket.bind(("127.0.0.1", 0))
        control_socket.bind(("127.0.0.1", 0))
        http, control = http_socket.getsockname()[1], control_socket.getsockname()[1]
    return {
        "FEDHET_STATE_DIR": str(folder / STATES),
        delivery.VARIABLE: str(folder / "delivered"),
        **os.environ,
        # So that Flower's processes find the user's own packages and folders of components.
        "PYTHONPATH": os.pathsep.join(str(Path.cwd() / path) for path in sys.path),
        components.SEARCH_PATH: os.pathsep.join(map(str, components.search_path())),
        SUBMITTED: str(home / "settings.json"),
        **flower_environment(home),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(http),
        "FLWR_LOCAL_CONTROL_API_PORT": str(control),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }


# ---- the submitted run
def _submit(
    arguments: list[str],
    environment: dict[str, str],
    has_ended: Callable[[], object],
    end_processes: Callable[[], None],
) -> str:
    """Submit the run, copy its log to stderr until it ends, and return its id.

    Args:
        arguments: the arguments of `flwr`.
        environment: the environment of `flwr`.
        has_ended: returns whether the server app has finished.
        end_processes: kills the command and all processes that it has started.

    Raises:
        RunFailed: Flower did not accept the run.
    """
    log: list[str] = []
    with subprocess.Popen(
        [str(BIN / "flwr"), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        copy = threading.Thread(target=_copy_log, args=(process.stdout, log), daemon=True)
        copy.start()
        try:
            # Flower would wait until every client has ended, even a client that hangs.
            while copy.is_alive() and not has_ended():
                copy.join(LOOK_SECONDS)
            copy.join(LAST_SECONDS)
        finally:
            if copy.is_alive():
                end_processes()  # ends all of them, because each of them holds the pipe open
                copy.join(LAST_SECONDS)
    run_id = re.search(r"Successfully started run (\d+)", "".join(log))
    if not run_id or (process.returncode and not has_ended()):
        texts = ["".join(log[-LAST_LINES:])]
        for path in Path(environment["FLWR_HOME"]).rglob("*.log"):  # they are removed soon
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            texts.append(f"; the end of {path.name}: " + "\n".join(lines[-LAST_LINES:]))
        problem = "lost" if run_id else "did not accept"
        raise RunFailed(
            f"`flwr run` {problem} the run (exit code {process.returncode}):"
            f" {' '.join(map(printed, texts))}"
        )
    return run_id[1]


def _copy_log(lines: Iterable[str], log: list[str]) -> None:
    with suppress(ValueError):  # the pipe is closed
        for line in lines:
            log.append(line)
            print(line, end="", file=sys.stderr, flush=True)


@contextmanager
def _interruption_recorded(folder: Path) -> Iterator[None]:
    """Record an interruption, because a killed server app may record a failure or nothing."""
    try:
        yield
    except KeyboardInterrupt:
        summary = read_or_empty(folder / "summary.json")
        if summary and summary["status"] != "ok":
            ended = {"status": "interrupted", "reason": "stopped by the user"}
            LastingJson(folder / "summary.json").write_last({**summary, **ended})
        raise
