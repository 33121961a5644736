"""Flower's simulation on Ray, in a thread that can be left at any time.

Ray takes seconds to start, its calls ignore signals, and Flower waits for every client that trains.
So all of this happens in a thread of its own. The server runs in the thread that called, which
notices Ctrl-C at once; then the clients' processes are killed.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from fedhet.core.errors import RunFailed
from fedhet.engines.contexts import PassingStates
from fedhet.flower.nodes import Nodes
from fedhet.process import TOGETHER_SECONDS

if TYPE_CHECKING:
    from flwr.client import Client
    from flwr.common import Context
    from flwr.server import Grid, ServerApp

POLL_SECONDS = 0.02  # between two looks for replies; Flower's own .1 s is a third of a small round
LOOKS_PER_SECOND = 5000  # of all threads together, which take a quarter of a core
SIGNAL_SECONDS = 0.05  # between two looks whether Ray has replaced our signal handlers
END_SECONDS = 2.5  # how long the simulation may take to end after an interruption
INTERRUPTED = 130  # exit code


class Simulation:
    """Nodes with one client each, which serve until the end of the block.

    Args:
        client_fn: what each client's process calls for a message.
        clients: their number.
        resources: `num_cpus` and `num_gpus` of each.
        replaced: whether a client's process that has died is replaced.
        init_args: the arguments of `ray.init`.
        nodes: learns when no node will answer any more.

    Attributes:
        states: the clients' states.
    """

    def __init__(
        self,
        client_fn: Callable[[Context], Client],
        clients: int,
        *,
        resources: dict[str, float],
        replaced: bool,
        init_args: dict[str, Any],
        nodes: Nodes,
    ) -> None:
        self._client_fn = client_fn
        self._clients = clients
        self._resources = resources
        self._replaced = replaced
        self._init_args = init_args
        self._nodes = nodes
        self.states = PassingStates()
        self._thread = threading.Thread(target=self._simulate, name="simulation", daemon=True)
        self._started: queue.SimpleQueue[tuple[Grid, Context]] = queue.SimpleQueue()
        self._served = threading.Event()  # the server needs the nodes no longer
        self._actors: list[Any] = []
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Simulation:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end(cut=error is not None)
        self._thread.join(None if error is None else END_SECONDS)
        if self._thread.is_alive():
            atexit.register(self._leave)
        for number, handler in self._handlers.items():
            if handler is not None:
                signal.signal(number, handler)

    def _leave(self) -> None:
        """End the process without Ray's own end: in the middle of its start, that one crashes."""
        if self._thread.is_alive():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)  # the kernel then ends what Ray has started

    def nodes(self) -> tuple[Grid, Context]:
        """Wait until the simulation has started, and return what Flower gives to a server.

        Raises:
            RunFailed: the simulation did not start.
        """
        started = None
        while self._thread.is_alive():
            self._take_signals()
            with suppress(queue.Empty):
                started = self._started.get(timeout=SIGNAL_SECONDS)
                break
        self._take_signals()
        if started is None:
            raise RunFailed(f"Flower's simulation did not start: {self._nodes.ended}")
        return started

    def _end(self, *, cut: bool) -> None:
        # They would report each thing that this breaks.
        logging.getLogger("flwr").setLevel(logging.CRITICAL)
        if cut:
            logging.getLogger("ray").setLevel(logging.CRITICAL)
        if self._nodes.ended is None:
            self._nodes.ended = "the run has ended"
        self._served.set()

    # ---- signals
    def _take_signals(self) -> None:
        """Handle SIGINT and SIGTERM here: Ray, when it starts, makes SIGTERM dump the stack."""
        for number, handler in self._handlers.items():
            if handler is not None:
                signal.signal(number, self._interrupted if callable(handler) else handler)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        self._end(cut=True)  # first, because the server may be waiting for clients
        self._handlers[number](number, frame)

    # ---- in the thread
    def _simulate(self) -> None:
        import ray
        from flwr.client import ClientApp
        from flwr.simulation import run_simulation

        reason = "Flower's simulation has ended"
        try:
            if not self._served.is_set():
                ray.init(**self._init_args)  # Flower then does not start Ray in its own way
            if not self._served.is_set():
                with _own_backend(self._actors, self.states, self._served, self._replaced):
                    run_simulation(
                        self._server_app(),
                        ClientApp(client_fn=self._client_fn),
                        num_supernodes=self._clients,
                        backend_config={"client_resources": self._resources},
                    )
        except Exception as error:  # noqa: BLE001 -- the server's thread reports it
            reason = f"{type(error).__name__}: {error}"
        finally:
            if self._nodes.ended is None:
                self._nodes.ended = reason
            ray.shutdown()

    def _server_app(self) -> ServerApp:
        """A server that hands its nodes over to the other thread, and waits until it is done."""
        import ray
        from flwr.server import ServerApp

        app = ServerApp()

        @app.main()  # type: ignore[untyped-decorator]
        def main(grid: Grid, context: Context) -> None:
            hurry(grid, self._clients)
            _fail_at_end(grid, self._nodes)
            self._started.put((grid, context))
            self._served.wait()
            for actor in list(self._actors):  # Flower would wait for one that hangs
                ray.kill(actor)

        return app


# ---- Flower's ways
@contextmanager
def _own_backend(
    actors: list[Any], states: PassingStates, served: threading.Event, replaced: bool
) -> Iterator[None]:
    """Let Flower serve messages by the actors, the clients' processes, that it puts into the list.

    Flower's own backend gives further messages to an actor that is lost, which fails them all. And
    in the end it asks each actor to terminate, which each logs; Ray ends them anyway. Ray itself
    could restart an actor, but would then serve its message again, even where the run is ending.
    """
    import ray
    from flwr.server.superlink.fleet.vce.backend import raybackend

    class Backend(raybackend.RayBackend):
        def build(self, app_fn: Any) -> None:
            super().build(app_fn)
            actors.extend(self.pool.pool)
            self.idle: queue.SimpleQueue[Any] = queue.SimpleQueue()
            for actor in actors:
                self.idle.put(actor)

        def process_message(self, message: Any, context: Any) -> tuple[Any, Any]:
            actor = self._take()
            try:
                client = str(context.node_config["partition-id"])
                states.sending(context)
                _, *answer = ray.get(actor.run.remote(self.app_fn, message, client, context))
            except ray.exceptions.RayActorError:
                # What has ended the actor may also end the run, which has then not failed.
                if served.wait(TOGETHER_SECONDS) or not replaced:
                    actors.remove(actor)
                    actor = None
                else:
                    ray.kill(actor)  # it may be just out of reach
                    actors[actors.index(actor)] = actor = self.pool.create_actor_fn()
                raise
            finally:
                if actor is not None:
                    self.idle.put(actor)
            states.received(answer[1])
            return answer[0], answer[1]

        def _take(self) -> Any:
            while actors:
                with suppress(queue.Empty):
                    return self.idle.get(timeout=1.0)
            raise RuntimeError("all processes of clients are lost")

        def terminate(self) -> None:
            ray.shutdown()

    flowers_own = raybackend.RayBackend
    raybackend.RayBackend = Backend
    try:
        yield
    finally:
        raybackend.RayBackend = flowers_own


def hurry(grid: Grid, clients: int) -> None:
    """Let Flower's simulation look for replies more often than by default.

    Every client's reply is awaited by a thread, so the more clients, the longer the interval.
    """
    from flwr.superlink.grid import InMemoryGrid

    if isinstance(grid, InMemoryGrid):
        interval = max(POLL_SECONDS, clients / LOOKS_PER_SECOND)
        grid.pull_interval = min(grid.pull_interval, interval)


def _fail_at_end(grid: Any, nodes: Nodes) -> None:
    """Let those fail who wait for a node's reply once none will come: Flower lets them wait."""
    pull = grid.pull_messages

    def pull_messages(message_ids: Any) -> Any:
        if nodes.ended is not None:
            raise RunFailed(nodes.ended)
        return pull(message_ids)

    grid.pull_messages = pull_messages


@contextmanager
def quiet_flower() -> Iterator[None]:
    """Let Flower log only warnings: its other lines would bury the progress."""
    warnings.filterwarnings(
        "ignore", message=".*RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", category=FutureWarning
    )
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.WARNING)
    logger.addFilter(_no_deprecation)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeFilter(_no_deprecation)


def _no_deprecation(line: logging.LogRecord) -> bool:
    """Drop half a page about `run_simulation`, which nothing replaces for runs in a process."""
    return not str(line.msg).startswith("DEPRECATED FEATURE")
