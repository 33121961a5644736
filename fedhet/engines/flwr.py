"""Submits the run through `flwr run` to a Flower of its own on this machine, and tells how it truly
ended.

`flwr run --stream` exits with 0 whatever happens, leaves a daemon behind, and runs with that
daemon's environment. So each run here has its own FLWR_HOME and ports, asks `flwr ls` for the
status, and ends every process that it started."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from fedhet.config.catalogue import CONF
from fedhet.errors import ConfigError, RunFailed
from fedhet.record.run_folder import write_json

if TYPE_CHECKING:
    from fedhet.job import Job

END_SECONDS = 10.0  # for the daemon to end by itself before it is killed


def run(job: Job) -> Path:
    """Run the job; the server app writes the run folder, whose absolute path it is given."""
    app, folder = CONF.parent, Path(job.config.run_dir).resolve()
    if not (app / "pyproject.toml").exists():
        raise ConfigError(
            "engine=flwr submits fedhet's source folder, which is not here; clone it and `pip"
            " install -e .`"
        )
    if (folder / "summary.json").exists():
        raise ConfigError(f"hydra.run.dir={folder}: that folder already holds a run; name another")
    _ = job.strategy  # a setting that does not fit is told here, not in a log
    overrides = [
        *(line for line in job.config.overrides if not line.startswith("hydra.run.dir=")),
        f"hydra.run.dir={_quoted(str(folder))}",
    ]
    with ExitStack() as stack:
        home = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="fedhet-flwr-", ignore_cleanup_errors=True)
            )
        )
        environment = _environment(home)
        stack.enter_context(_daemon_ended(environment))
        settings = home / "run.toml"
        settings.write_text(
            f"overrides = {json.dumps(shlex.join(overrides), ensure_ascii=False)}\n",
            encoding="utf-8",
        )
        (home / "config.toml").write_text(
            '[superlink]\ndefault = "local"\n[superlink.local]\naddress = ":local:"\n'
        )
        options = [
            "--stream",
            "--federation-config",
            _resources(job),
            "--run-config",
            str(settings),
        ]
        stack.enter_context(_interruption_told(folder))
        run_id = _submit(["run", str(app), "local", *options], environment)
        status, details = _status(run_id, environment)
    if not (folder / "model.safetensors").exists() or status != "finished:completed":
        raise RunFailed(_reason(folder) or f"Flower says {status}: {details}", str(folder))
    return folder


@contextmanager
def _interruption_told(folder: Path) -> Iterator[None]:
    """Flower kills a server app that is stopped, which then cannot say so."""
    try:
        yield
    except KeyboardInterrupt:
        path = folder / "summary.json"
        if path.exists() and path.stat().st_size:
            write_json(
                path,
                {
                    **json.loads(path.read_text()),
                    "status": "interrupted",
                    "reason": "stopped by the user",
                },
            )
        raise


def _resources(job: Job) -> str:
    engine = job.config.cfg.engine
    if engine.num_cpus != int(engine.num_cpus):
        raise ConfigError(
            f"engine.num_cpus={engine.num_cpus}: `flwr run` takes whole CPUs per client"
        )
    nodes = engine.workers or len(job.task.sizes)
    return (
        f"num-supernodes={nodes} client-resources-num-cpus={int(engine.num_cpus)}"
        f" client-resources-num-gpus={float(engine.num_gpus)}"
    )


def _quoted(path: str) -> str:
    """A Hydra value whatever characters the path has."""
    return "'" + path.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _environment(home: Path) -> dict[str, str]:
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        ports = str(one.getsockname()[1]), str(two.getsockname()[1])
    return {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": ports[0],
        "FLWR_LOCAL_CONTROL_API_PORT": ports[1],
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        # flwr starts its helpers by name, so they must be this environment's.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }


def _flwr(arguments: list[str]) -> list[str]:
    return [str(Path(sys.executable).parent / "flwr"), *arguments]


def _submit(arguments: list[str], environment: dict[str, str]) -> str:
    """Stream the run's log to stderr; returns its id."""
    run_id, said = "", []
    with subprocess.Popen(
        _flwr(arguments),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout
        for line in process.stdout:
            said.append(line)
            print(line, end="", file=sys.stderr, flush=True)
            if found := re.search(r"Successfully started run (\d+)", line):
                run_id = found[1]
    if process.returncode or not run_id:
        raise RunFailed(
            f"`flwr run` did not accept the run (exit code {process.returncode}):"
            f" {''.join(said[-5:]).strip()}"
        )
    return run_id


def _status(run_id: str, environment: dict[str, str]) -> tuple[str, str]:
    found = subprocess.run(
        _flwr(["ls", "local", "--format", "json"]),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    runs: list[dict[str, Any]] = json.loads(found.stdout or "{}").get("runs", [])
    mine = next((each for each in runs if str(each["run-id"]) == run_id), None)
    return (
        (mine["status"], mine["status-details"])
        if mine
        else ("unknown", found.stdout + found.stderr)
    )


def _reason(folder: Path) -> str | None:
    """What the server app recorded."""
    path = folder / "summary.json"
    return (
        json.loads(path.read_text()).get("reason")
        if path.exists() and path.stat().st_size
        else None
    )


@contextmanager
def _daemon_ended(environment: dict[str, str]) -> Iterator[None]:
    """End the SuperLink that `flwr run` has started, and all its descendants, whatever happens
    inside."""
    try:
        yield
    finally:
        port = environment["FLWR_LOCAL_SUPERLINK_HTTP_API_PORT"]
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or []
            if any("flower-superlink" in part for part in line) and port in line:
                end_tree(process)


def end_tree(process: psutil.Process) -> None:
    """Ask a process and its descendants to end; kill those that do not."""
    try:
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for member in family:
        try:
            member.terminate()
        except psutil.NoSuchProcess:
            continue
    for member in psutil.wait_procs(family, timeout=END_SECONDS)[1]:
        member.kill()
