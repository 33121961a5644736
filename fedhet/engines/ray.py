"""Clients in Ray's processes, on this machine or those of a cluster.

A client's state travels with its messages, so that any process can serve it.
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

SIGNAL_SECONDS = 0.05  # in which a signal is noticed: Ray's own calls ignore them
INTERRUPTED = 130  # exit code
REACH_SECONDS = 8.0  # how long a cluster may take to answer
PROBE = Path(__file__).with_name("cluster_probe.py")
# Ray reads them when it is imported: how often and how long it tries to reach what does not answer.
PATIENCE = {"RAY_NUM_REDIS_GET_RETRIES": "3", "RAY_gcs_server_request_timeout_seconds": "3"}


def run(job: Job) -> Path:
    """Run the job under Ray: on a cluster of its own, or on the one that engine.address names.

    Raises:
        ConfigError: the cluster does not answer or refuses us, or no client can ever fit.
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
    """The arguments of `ray.init`, inside the block."""
    if address is None:
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        temporary = TemporaryFolder("fedhet-ray-")
        variables = {"PYTHONPATH": path, **temporary.environment}
        with temporary as folder, ExitStack() as stack:
            stack.callback(temporary.end_processes)  # one that a signal has met ends in seconds
            yield {
                "address": "local",  # not one that RAY_ADDRESS or an earlier `ray start` names
                "include_dashboard": False,
                "logging_level": logging.ERROR,
                # Without a working_dir Ray searches the current folder first, so clients might
                # find another fedhet there than the one that runs.
                "runtime_env": {"env_vars": variables, "working_dir": folder},
            }
        return
    with runtime_env() as environment:
        yield {"address": address, "logging_level": logging.ERROR, "runtime_env": environment}


@contextmanager
def _started(arguments: dict[str, Any]) -> Iterator[None]:
    """Ray, inside the block. Its start takes seconds, so that it happens in a thread.

    Raises:
        RunFailed: it did not start.
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
        except Exception as error:  # noqa: BLE001 -- the thread that waits reports it
            problems.append(error)
        started.set()
        ended.wait()  # Ray's processes end with the thread that has started them

    def leave() -> None:  # in the middle of its start, Ray's own end crashes
        if not started.is_set():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)  # the kernel then ends what Ray has started

    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in SIGNALS} if main else {}
    threading.Thread(target=start, daemon=True).start()
    try:
        waiting = True
        while waiting:
            waiting = not started.wait(SIGNAL_SECONDS)
            for number, handler in handlers.items():  # Ray's own dumps the stack
                signal.signal(number, handler)
        if problems:
            told = printed(str(problems[0]))
            raise RunFailed(f"Ray did not start: {type(problems[0]).__name__}: {told}")
        yield
    finally:
        logging.getLogger("ray").setLevel(logging.CRITICAL)  # of each thing that this breaks
        if started.is_set():
            ray.shutdown()
            ended.set()
        else:
            atexit.register(leave)


class ClientStates:
    """The states of clients, a store for each: it travels with the client's messages."""

    def __init__(self) -> None:
        self.of: dict[int, MemoryStore] = defaultdict(partial(MemoryStore, sys.maxsize))

    def load(self, pid: int, version: int) -> Tree | None:
        return self.of[pid].load(pid, version)

    def save(self, pid: int, version: int, state: Tree, keep: Collection[int]) -> None:
        self.of[pid].save(pid, version, state, keep)


class RayTransport(Pool):
    """As many processes as fit, each of which is an actor of Ray.

    Args:
        job: what they serve.
    """

    def __init__(self, job: Job) -> None:
        import ray

        self._ray = ray
        super().__init__(job.config.run.replies, some=True)
        self.store = ClientStates()
        engine = job.config.run.engine
        self._grows = engine.address is None  # elsewhere that could wait for a machine that is lost
        # Not restarted by Ray, which would serve a message once more, also in a run that ends.
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
        self._sent: dict[int, tuple[Tree, Any]] = {}  # weights that several messages share, once

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
        self._ray.kill(worker)  # it may be just out of reach
        return None

    def _replacement(self, *, first: bool = False) -> list[Any]:
        if first or self._grows:
            actor = self._actor()
            self._workers[actor] = None
            return [actor]
        if not self._workers:
            raise RunFailed("all processes of clients are lost")
        return []


class RayClients:
    """A process of clients, on whichever machine Ray has started it.

    Args:
        settings: the composed configuration, whose files need not exist on this machine.
        folder: to which its relative paths are relative.
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
                "its samples, or how they are shared out, are not those of the server: every"
                " machine must hold the whole data set"
            )
        return job

    def serve(self, msg: Broadcast, weights: Tree, store: MemoryStore) -> tuple[Reply, MemoryStore]:
        """The reply to a message, and the client's states after it."""
        try:
            return self._job.client(store).handle(replace(msg, weights=weights)), store
        except Exception as error:  # the client's own errors are Failures: this one is the node's
            logging.getLogger("fedhet").debug("client %d", msg.pid, exc_info=True)
            cause = f"its node cannot serve this run: {type(error).__name__}: {error}"
            return Failure(msg.pid, msg.phase, msg.step, cause), store


def _places(node: dict[str, float], engine: Engine) -> int:
    """How many clients fit on a node."""
    needs = {"CPU": engine.num_cpus, "GPU": engine.num_gpus}
    return int(min(node.get(name, 0.0) / needed for name, needed in needs.items() if needed))


def check_resources(
    address: str | None, group: str, needs: Mapping[str, float], each: str = ""
) -> None:
    """Refuse what can never fit: Ray would wait for a place without end.

    Args:
        address: of the cluster, `<group>.address`; None: this machine.
        group: of the settings, for messages.
        needs: the settings `num_cpus` and `num_gpus`.
        each: whose they are, for messages.

    Raises:
        ConfigError: no machine has so many, or the cluster cannot be used.
    """
    if address is None:
        import torch

        nodes = [{"CPU": os.cpu_count() or 1.0, "GPU": float(torch.cuda.device_count())}]
    else:
        nodes = reach(address, f"{group}.address")
    where = "this machine has" if address is None else "the largest node of the cluster has"
    for name, resource in (("num_cpus", "CPU"), ("num_gpus", "GPU")):
        most = max((node.get(resource, 0.0) for node in nodes), default=0.0)
        if needs[name] > most:
            raise ConfigError(f"{group}.{name}={needs[name]:g}{each}, but {where} {most:g}")


# ---- an existing cluster
def reach(address: str, setting: str = "engine.address") -> list[dict[str, float]]:
    """Return the resources of each node of the cluster at `<host>:<port>` or "auto".

    Args:
        address: where the cluster is.
        setting: what names it, for messages.

    Raises:
        ConfigError: this process cannot use the cluster; the message says why.
    """
    if not re.fullmatch(r"auto|[^/]+:\d+", address):
        raise ConfigError(
            f"{setting}={address}: it must be auto, or <host>:<port> with the port of"
            " `ray start --head` (6379 by default)"
        )
    # -P: the probe must not import ray.py, which is beside it, in place of Ray.
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
            f"{setting}={address}: no Ray cluster has answered there within {REACH_SECONDS:g} s"
            " to this machine, which must be one of its nodes and, where it asks for a token, have"
            f" it (docs/scaling.md); Ray says: {last}"
        )
    nodes: list[dict[str, float]] = json.loads(answers[-1])
    return nodes


# ---- what travels to the nodes
@contextmanager
def runtime_env() -> Iterator[dict[str, Any]]:
    """Ray's description of what each node gets: the code of this process, and its settings.

    fedhet itself is always sent, because equal bytes take equal code. A trusted package is sent
    unless it is installed as the dependencies are, which every node must have anyway. The code is
    the `working_dir` of the clients' processes, because Ray would otherwise prefer what lies in
    the folder of the same name as ours on their machine. It must exist until Ray has read it.
    """
    with TemporaryFolder("fedhet-ray-") as folder:
        for name in {name.partition(".")[0] for name in trusted()}:
            _copy_code(name, Path(folder))
        inside = Path(folder, "fedhet", "conf")
        if not inside.exists():  # it lies beside the package in a clone
            shutil.copytree(CONF, inside)
        variables = {name: value for name, value in os.environ.items() if name[:7] == "FEDHET_"}
        yield {"working_dir": folder, "env_vars": variables}


def _copy_code(package: str, folder: Path) -> None:
    """Copy the folder or file of a package, if it must be sent."""
    spec = find_spec(package)
    if spec is None:
        return  # the run has no need of it, or its own error says that it is missing
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
