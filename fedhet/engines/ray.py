"""The engine that runs clients in Ray's processes, on this machine or in a cluster.

A client's state travels with its messages, so that any process can serve the client.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedhet.core.errors import ConfigError, RunFailed, printed
from fedhet.core.messages import Broadcast, Failure, Reply
from fedhet.core.trees import Tree
from fedhet.engines.pool import Pool
from fedhet.runs.config import sent
from fedhet.runs.config.catalogue import CONF
from fedhet.runs.config.instantiation import trusted
from fedhet.runs.config.validation import Engine
from fedhet.runs.guard import TemporaryFolder
from fedhet.runs.job import Job, begin
from fedhet.runs.process import SIGNALS, pin_threads
from fedhet.runs.stores import MemoryStore

SIGNAL_SECONDS = 0.05  # signals are noticed within this time: Ray's own calls ignore them
INTERRUPTED = 130  # exit code
REACH_SECONDS = 8.0  # a cluster must answer within this time
PROBE = Path(__file__).with_name("cluster_probe.py")
# Ray reads these variables when it is imported. They say how often and how long it tries to reach a
# silent cluster.
PATIENCE = {"RAY_NUM_REDIS_GET_RETRIES": "3", "RAY_gcs_server_request_timeout_seconds": "3"}


def run(job: Job) -> Path:
    """Run the job under Ray, on a new local cluster or on the cluster at engine.address.

    Raises:
        ConfigError: the cluster does not answer or refuses us, or no machine is large enough for a
            client.
        RunFailed: Ray did not start, a client failed and on_failure is "stop", or no client
            succeeded.
    """
    engine = job.config.run.engine
    needs = {"num_cpus": engine.num_cpus, "num_gpus": engine.num_gpus}
    check_resources(engine.address, "engine", needs, " per client")
    loop = begin(job)
    with loop.ending(), ray_arguments(engine.address) as arguments, _started(arguments):
        loop.run(RayTransport(job))
    return job.run_dir


@contextmanager
def ray_arguments(address: str | None) -> Iterator[dict[str, Any]]:
    """Yield the arguments of `ray.init`; their folders exist inside the block."""
    if address is None:
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        temporary = TemporaryFolder("fedhet-ray-")
        variables = {"PYTHONPATH": path, **temporary.environment}
        with temporary as folder, ExitStack() as stack:
            stack.callback(temporary.end_processes)  # an interrupted process may take seconds
            yield {
                "address": "local",  # not a cluster of RAY_ADDRESS or of an earlier `ray start`
                "include_dashboard": False,
                "logging_level": logging.ERROR,
                # Without a working_dir, Ray searches the current folder first. Clients might then
                # find another fedhet there.
                "runtime_env": {"env_vars": variables, "working_dir": folder},
            }
        return
    with runtime_env() as environment:
        yield {"address": address, "logging_level": logging.ERROR, "runtime_env": environment}


@contextmanager
def _started(arguments: dict[str, Any]) -> Iterator[None]:
    """Run Ray inside the block. Ray takes seconds to start, so a thread starts it.

    Raises:
        RunFailed: Ray did not start.
    """
    import ray

    warnings.filterwarnings(
        "ignore", message=".*RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", category=FutureWarning
    )
    problems: list[Exception] = []
    started, ended = threading.Event(), threading.Event()

    def start() -> None:
        try:
            ray.init(**arguments)
        except Exception as error:  # noqa: BLE001 -- the waiting thread reports it
            problems.append(error)
        started.set()
        ended.wait()  # Ray's processes end with the thread that has started them

    def leave() -> None:  # in the middle of its start, Ray's own shutdown crashes
        if not started.is_set():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)  # the kernel then ends the processes that Ray has started

    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in SIGNALS} if main else {}
    threading.Thread(target=start, daemon=True).start()
    try:
        waiting = True
        while waiting:
            waiting = not started.wait(SIGNAL_SECONDS)
            for number, handler in handlers.items():  # Ray's own handler dumps the stack
                signal.signal(number, handler)
        if problems:
            text = printed(str(problems[0]))
            raise RunFailed(f"Ray did not start: {type(problems[0]).__name__}: {text}")
        yield
    finally:
        logging.getLogger("ray").setLevel(logging.CRITICAL)  # hides the loss of connections
        if started.is_set():
            ray.shutdown()
            ended.set()
        else:
            atexit.register(leave)


class ClientStates:
    """The clients' states: each client has a store, which travels with its messages."""

    def __init__(self) -> None:
        self.of: dict[int, MemoryStore] = defaultdict(partial(MemoryStore, sys.maxsize))

    def load(self, pid: int, version: int) -> Tree | None:
        return self.of[pid].load(pid, version)

    def save(self, pid: int, version: int, state: Tree, keep: Collection[int]) -> None:
        self.of[pid].save(pid, version, state, keep)


class RayTransport(Pool):
    """Serves clients in Ray actors: as many processes as the cluster has resources for.

    Args:
        job: the run that they serve.
    """

    def __init__(self, job: Job) -> None:
        import ray

        self._ray = ray
        super().__init__(job.config.run.replies, some=True)
        self.store = ClientStates()
        engine = job.config.run.engine
        # In a cluster, a new actor might wait for a machine that is lost.
        self._grows = engine.address is None
        # Ray must not restart actors: it would serve a message again, even while the run ends.
        asked: Any = {"num_cpus": engine.num_cpus, "num_gpus": engine.num_gpus, "max_restarts": 0}
        actor: Any = ray.remote(**asked)(RayClients)
        self._actor = partial(
            actor.remote, sent.written(job.config), str(Path.cwd()), job.data_digest
        )
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        places = sum(_places(node, engine) for node in nodes)
        for _ in range(min(places, len(job.task.sizes))):
            self._replacement(first=True)

    def _begin(self, plan: list[Broadcast]) -> None:
        self._sent: dict[int, tuple[Tree, Any]] = {}  # shared weights are put into Ray only once

    def _send(self, worker: Any, message: Broadcast) -> Any:
        key = id(message.weights)
        if key not in self._sent:
            self._sent[key] = message.weights, self._ray.put(message.weights)
        store = self.store.of[message.pid]
        self._workers[worker] = worker.serve.remote(
            replace(message, weights={}), self._sent[key][1], store
        )
        return worker

    def _wait(self, busy: list[Any], seconds: float | None) -> list[Any]:
        until = SIGNAL_SECONDS if seconds is None else min(seconds, SIGNAL_SECONDS)
        ready, _ = self._ray.wait([self._workers[worker] for worker in busy], timeout=until)
        return [worker for worker in busy if self._workers[worker] in ready]

    def _receive(self, worker: Any) -> Reply:
        try:
            reply: Reply
            reply, self.store.of[reply.pid] = self._ray.get(self._workers[worker])
        except self._ray.exceptions.RayActorError as error:
            raise EOFError from error
        return reply

    def _remove(self, worker: Any, *, kill: bool = False) -> int | None:
        del self._workers[worker]
        self._ray.kill(worker)  # the worker may be alive and only out of reach
        return None

    def _replacement(self, *, first: bool = False) -> list[Any]:
        if first or self._grows:
            actor = self._actor()
            self._workers[actor] = None
            return [actor]
        if not self._workers:
            raise RunFailed("all processes of clients in the Ray cluster are lost")
        return []


class RayClients:
    """A process that serves clients, on any machine of the cluster.

    Args:
        settings: the composed configuration; its yaml files need not exist on this machine.
        folder: the base of its relative paths.
        data: the digest of the data that every machine must have.
    """

    def __init__(self, settings: str, folder: str, data: str) -> None:
        if Path(folder).is_dir():
            os.chdir(folder)
        self._settings = settings
        self._data = data

    @cached_property
    def _job(self) -> Job:
        config = sent.read(self._settings)
        pin_threads(config.run.engine.threads)
        job = Job(config, engine="ray")
        if job.data_digest != self._data:
            raise ConfigError(
                "its samples, or their split over the clients, differ from the server's: every"
                " machine must hold the whole data set"
            )
        return job

    def serve(self, msg: Broadcast, weights: Tree, store: MemoryStore) -> tuple[Reply, MemoryStore]:
        """Return the reply to a message, and the client's states after it."""
        try:
            return self._job.client(store).handle(replace(msg, weights=weights)), store
        # `handle` turns the client's own errors into Failures. This is an error of the node.
        except Exception as error:
            logging.getLogger("fedhet").debug("client %d", msg.pid, exc_info=True)
            cause = f"its node cannot serve this run: {type(error).__name__}: {error}"
            return Failure(msg.pid, msg.phase, msg.step, cause), store


def _places(node: dict[str, float], engine: Engine) -> int:
    """Return how many clients fit on a node."""
    needs = {"CPU": engine.num_cpus, "GPU": engine.num_gpus}
    return int(min(node.get(name, 0.0) / needed for name, needed in needs.items() if needed))


def check_resources(
    address: str | None, group: str, needs: Mapping[str, float], each: str = ""
) -> None:
    """Refuse resources that no machine has: Ray would wait for them for ever.

    Args:
        address: the address of the cluster, `<group>.address`; None: this machine.
        group: the group of the settings, for messages.
        needs: the settings `num_cpus` and `num_gpus`.
        each: the unit that needs them, for messages, such as " per client".

    Raises:
        ConfigError: no machine has so many CPUs or GPUs, or the cluster cannot be used.
    """
    if address is None:
        import torch

        nodes = [{"CPU": os.cpu_count() or 1.0, "GPU": float(torch.cuda.device_count())}]
    else:
        nodes = reach(address, f"{group}.address")
    where = "this machine has only" if address is None else "the cluster's largest node has only"
    for name, resource in (("num_cpus", "CPU"), ("num_gpus", "GPU")):
        most = max((node.get(resource, 0.0) for node in nodes), default=0.0)
        if needs[name] > most:
            raise ConfigError(f"{group}.{name}={needs[name]:g}{each}, but {where} {most:g}")


# ---- an existing cluster
def reach(address: str, setting: str = "engine.address") -> list[dict[str, float]]:
    """Return the resources of each node of the cluster at `<host>:<port>` or "auto".

    Args:
        address: the address of the cluster.
        setting: the setting that names the address, for messages.

    Raises:
        ConfigError: this process cannot use the cluster; the message says why.
    """
    if not re.fullmatch(r"auto|[^/]+:\d+", address):
        raise ConfigError(
            f"{setting}={address}: it must be auto, or <host>:<port> with the port of"
            " `ray start --head` (6379 by default)"
        )
    # -P: the probe must not import ray.py, which lies next to it, instead of Ray.
    command = [sys.executable, "-P", str(PROBE), address]
    try:
        process = subprocess.run(
            command,
            env={**os.environ, **PATIENCE},
            capture_output=True,
            text=True,
            timeout=REACH_SECONDS,
            check=False,
        )
        output, log = process.stdout, process.stderr
    except subprocess.TimeoutExpired as error:
        output, log = "", (error.stderr or b"").decode(errors="replace")
    answers = [line for line in output.splitlines() if line.startswith("[")]
    if not answers:
        last = printed(log.strip().rpartition("\n")[2])
        raise ConfigError(
            f"{setting}={address}: no Ray cluster has answered there within {REACH_SECONDS:g} s;"
            " this machine must be one of the cluster's nodes, and have its token if it uses tokens"
            f" (docs/scaling.md); Ray says: {last}"
        )
    nodes: list[dict[str, float]] = json.loads(answers[-1])
    return nodes


# ---- the code for the nodes
@contextmanager
def runtime_env() -> Iterator[dict[str, Any]]:
    """Yield Ray's `runtime_env`, by which each node gets this process's code and variables.

    fedhet itself is always sent, because equal results need equal code. A trusted package is sent,
    unless it is installed in site-packages like the dependencies, which every node must have
    anyway. The code is the `working_dir` of the clients' processes. Otherwise Ray would prefer the
    code in a folder with the same name as ours on their machine. The folder must exist until Ray
    has read it.
    """
    with TemporaryFolder("fedhet-ray-") as folder:
        for name in {name.partition(".")[0] for name in trusted()}:
            _copy_code(name, Path(folder))
        inside = Path(folder, "fedhet", "conf")
        if not inside.exists():  # in a clone, conf lies next to the package
            shutil.copytree(CONF, inside)
        variables = {name: value for name, value in os.environ.items() if name[:7] == "FEDHET_"}
        yield {"working_dir": folder, "env_vars": variables}


def _copy_code(package: str, folder: Path) -> None:
    """Copy the folder or file of a package, if it must be sent."""
    spec = find_spec(package)
    if spec is None:
        return  # the run does not need it, or the run's own error says that it is missing
    locations = list(spec.submodule_search_locations or ())
    source = Path(locations[0] if locations else spec.origin or "")
    installed = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]
    if package != "fedhet" and any(source.is_relative_to(where) for where in installed):
        return
    if source.is_dir():
        caches = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, folder / source.name, ignore=caches)
    else:
        shutil.copy(source, folder)
