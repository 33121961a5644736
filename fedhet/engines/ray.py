"""The engine that runs clients in Ray's processes, on this machine or in a cluster.

A client's state stays in Ray's object store. Its reference travels with the client's messages, so
that any process can serve the client.
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
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import ObjectLostError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor

from fedhet.core.client.state import Store
from fedhet.core.errors import ConfigError, LostState, RunFailed, printed
from fedhet.core.messages import Broadcast, Failure, Reply, payload
from fedhet.core.trees import Tree
from fedhet.engines.pool import MachineLost, Pool
from fedhet.runs.config import sent
from fedhet.runs.config.catalogue import CONF
from fedhet.runs.config.instantiation import trusted
from fedhet.runs.config.validation import Engine
from fedhet.runs.guard import TemporaryFolder
from fedhet.runs.job import Job, begin
from fedhet.runs.process import SIGNALS, pin_threads

SIGNAL_SECONDS = 0.05  # signals are noticed within this time: Ray's own calls ignore them
INTERRUPTED = 130  # exit code
REACH_SECONDS = 8.0  # a cluster must answer within this time
# A worker gets at most this many messages, and bytes of weights, in one call: a call costs Ray some
# milliseconds.
BATCH, BATCH_BYTES = 16, 2**24
Key = tuple[int, int]  # a client, and a version of its state
States = dict[Key, Any]  # a client's states: key -> Ray's reference to a dict that has the state
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
            raise RunFailed(
                f"Ray did not start: {type(problems[0]).__name__}: {printed(str(problems[0]))}"
            )
        ray.util.register_serializer(Tensor, **TENSORS)
        yield
    finally:
        logging.getLogger("ray").setLevel(logging.CRITICAL)  # hides the loss of connections
        if started.is_set():
            ray.util.deregister_serializer(Tensor)
            ray.shutdown()
            ended.set()
        else:
            atexit.register(leave)


def _packed(tensor: Tensor) -> tuple[Any, torch.dtype, torch.Size]:
    """Return the bytes, type and shape of a tensor."""
    content = tensor.detach().cpu().reshape(-1).view(torch.uint8)
    return content.numpy(), tensor.dtype, tensor.shape


def _unpacked(packed: tuple[Any, torch.dtype, torch.Size]) -> Tensor:
    """Return the tensor, as a copy: nobody may change the memory of Ray's object store."""
    content, dtype, shape = packed
    tensor = torch.empty(shape, dtype=dtype)
    tensor.view(-1).view(torch.uint8).numpy()[:] = content
    return tensor


# Ray carries the bytes of tensors as they are; torch's pickles cost many times as much.
TENSORS = {"serializer": _packed, "deserializer": _unpacked}


class SentStates:
    """The store of one client while a message is served: its states are in Ray's object store.

    Args:
        refs: (client, version) -> Ray's reference to a dict that has this state.

    Attributes:
        new: the states that were saved since, packed.
    """

    def __init__(self, refs: States) -> None:
        self.refs = refs
        self.new: dict[Key, dict[str, Any]] = {}

    def load(self, pid: int, version: int) -> Tree | None:
        key = pid, version
        try:
            states: Any = self.new if key in self.new else ray.get(self.refs[key])
        except KeyError:
            return None
        except ObjectLostError as error:
            raise LostState(
                f"client {pid}: its state of round {version} is lost with the machine that had it"
            ) from error
        return {name: _unpacked(packed) for name, packed in states[key].items()}

    def save(self, pid: int, version: int, state: Tree, keep: Collection[int]) -> None:
        self.refs = {k: ref for k, ref in self.refs.items() if k[0] != pid or k[1] in keep}
        self.new[pid, version] = {name: _packed(t.clone()) for name, t in state.items()}


class ClientStates:
    """The states of all clients. They stay in Ray's object store; this process has references.

    Attributes:
        of: client -> the references to its states.
    """

    def __init__(self) -> None:
        self.of: dict[int, States] = defaultdict(dict)

    def load(self, pid: int, version: int) -> Tree | None:
        return SentStates(self.of[pid]).load(pid, version)

    def save(self, pid: int, version: int, state: Tree, keep: Collection[int]) -> None:
        states = SentStates(self.of[pid])
        states.save(pid, version, state, keep)
        self.of[pid] = states.refs | dict.fromkeys(states.new, ray.put(states.new))


class RayTransport(Pool):
    """Serves clients in Ray actors: as many processes as the cluster has resources for.

    Args:
        job: the run that they serve.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job.config.run.replies, some=True)
        self.store = ClientStates()
        self._engine = engine = job.config.run.engine
        self._clients = len(job.task.sizes)
        self._nodes: dict[Any, str] = {}  # worker -> the id of its machine
        # Ray must not restart actors: it would serve a message again, even while the run ends.
        asked: Any = {"num_cpus": engine.num_cpus, "num_gpus": engine.num_gpus, "max_restarts": 0}
        self._actor: Any = ray.remote(**asked)(RayClients)
        self._arguments = sent.written(job.config), str(Path.cwd()), job.data_digest

    def _begin(self, plan: list[Broadcast]) -> None:
        self._replacement()
        # Shared weights are put into Ray only once.
        shared = {id(msg.weights): msg.weights for msg in plan}
        self._sent = {key: ray.put(weights) for key, weights in shared.items()}
        size = sum(payload("", plan[0].weights, plan[0].extras).values()) if plan else 0
        self._most = max(1, min(BATCH, BATCH_BYTES // max(size, 1)))

    def _alive(self) -> dict[str, dict[str, float]]:
        """Return the resources of each machine of the cluster, by the machine's id."""
        return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}

    def _replacement(self) -> list[Any]:
        """Start workers for all free places of the cluster, and return them.

        Raises:
            RunFailed: the cluster has no place, and no worker is left.
        """
        taken = Counter(self._nodes[worker] for worker in self._workers)
        free = [
            (place, node)
            for node, resources in self._alive().items()
            for place in range(taken[node], _places(resources, self._engine))
        ]
        started = []
        for _, node in sorted(free)[: self._clients - len(self._workers)]:
            # If Ray chose the machine, the worker might wait for one that is lost.
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            worker = self._actor.options(scheduling_strategy=there).remote(*self._arguments)
            self._workers[worker], self._nodes[worker] = None, node
            started.append(worker)
        if not self._workers:
            raise RunFailed("all processes of clients in the Ray cluster are lost")
        return started

    def _send(self, worker: Any, messages: list[Broadcast]) -> Any:
        weights = {id(msg.weights): self._sent[id(msg.weights)] for msg in messages}
        visits = [
            (replace(msg, weights={}), id(msg.weights), self.store.of[msg.pid]) for msg in messages
        ]
        serve = worker.serve.options(num_returns=1 + len(messages))
        self._workers[worker] = serve.remote(visits, weights)
        return worker

    def _wait(self, busy: list[Any], seconds: float | None) -> list[Any]:
        until = SIGNAL_SECONDS if seconds is None else min(seconds, SIGNAL_SECONDS)
        # The wait for a state copies it to this machine. So it is not lost if the worker's machine
        # is lost later.
        last = {self._workers[worker][-1]: worker for worker in busy}
        ready, _ = ray.wait([*last], timeout=until)
        return [last[ref] for ref in ready]

    def _receive(self, worker: Any) -> list[Reply]:
        _, *states = self._workers[worker]
        try:
            served, *_ = ray.get(self._workers[worker])
        except (RayActorError, ObjectLostError) as error:
            gone = self._nodes[worker] not in self._alive()
            raise (MachineLost if gone else EOFError) from error
        for (reply, kept, new), ref in zip(served, states, strict=True):
            before = self.store.of[reply.pid]
            self.store.of[reply.pid] = {k: before[k] for k in kept} | dict.fromkeys(new, ref)
        return [reply for reply, _, _ in served]

    def _remove(self, worker: Any, *, kill: bool = False) -> int | None:
        del self._workers[worker]
        ray.kill(worker)  # the worker may be alive and only out of reach
        return None


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
        ray.util.register_serializer(Tensor, **TENSORS)
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

    def serve(self, visits: list[tuple[Broadcast, int, States]], weights: dict[int, Any]) -> Any:
        """Serve messages, one after another.

        What an actor returns belongs to the server's process, so it outlives the actor.

        Args:
            visits: each message without its weights, their key, and the client's states.
            weights: Ray's references to the weights, by key.

        Returns:
            A list with the reply to each message, which of the client's states are kept, and which
            are new; then, for each message, a dict with the new states.
        """
        received = {key: ray.get(ref) for key, ref in weights.items()}
        stores = [SentStates(refs) for _, _, refs in visits]
        served = [
            (self._reply(replace(msg, weights=received[key]), store), [*store.refs], [*store.new])
            for (msg, key, _), store in zip(visits, stores, strict=True)
        ]
        return served, *(store.new for store in stores)

    def _reply(self, msg: Broadcast, store: Store) -> Reply:
        try:
            return self._job.client(store).handle(msg)
        # `handle` turns the client's own errors into Failures. This is an error of the node.
        except Exception as error:
            logging.getLogger("fedhet").debug("client %d", msg.pid, exc_info=True)
            cause = f"its node cannot serve this run: {type(error).__name__}: {error}"
            return Failure(msg.pid, msg.phase, msg.step, cause)


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
    here = {"CPU": os.cpu_count() or 1.0, "GPU": float(torch.cuda.device_count())}
    nodes = [here] if address is None else reach(address, f"{group}.address")
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
            " `ray start --head` (6379 by default), because the run must be on a machine of the"
            " cluster; ray:// is for other machines"
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
        shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, folder)
