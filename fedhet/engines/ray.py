"""Flower's simulation on Ray, with one node per client.

Each client's state travels in its node's context.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhet.errors import ConfigError
from fedhet.state import ContextStore

if TYPE_CHECKING:
    from flwr.client import Client
    from flwr.common import Context
    from flwr.server import Grid

    from fedhet.job import Job

POLL_SECONDS = 0.02  # between two looks for replies; Flower's own .1 s is a third of a small round
LOOKS_PER_SECOND = 5000  # of all threads together, which take a quarter of a core


def run(job: Job) -> Path:
    """Run the job under Ray, on an existing cluster if engine.address names one.

    Raises:
        ConfigError: the cluster does not answer, or no client can ever fit.
        RunFailed: a client failed and on_failure is "stop", or no client succeeded.
    """
    from flwr.client import ClientApp
    from flwr.server import ServerApp
    from flwr.simulation import run_simulation

    from fedhet.flower.apps import client_for, components

    class App(ServerApp):
        def __call__(self, grid: Grid, context: Context) -> None:
            hurry(grid, len(job.task.sizes))
            super().__call__(grid, context)

    engine = job.config.cfg.engine
    _check_resources(engine)
    recorder = job.recorder
    overrides = job.config.overrides

    def client_fn(context: Context) -> Client:
        return client_for(context, ContextStore(context.state), overrides, "ray")

    init_args: dict[str, Any] = {"include_dashboard": False}
    if engine.address:
        init_args = {"address": engine.address}
    try:
        with _quiet_flower(), job.progress() as observe:
            run_simulation(
                App(server_fn=lambda context: components(job, observe)),
                ClientApp(client_fn=client_fn),
                num_supernodes=len(job.task.sizes),
                backend_config={
                    "client_resources": {
                        "num_cpus": engine.num_cpus,
                        "num_gpus": engine.num_gpus,
                        # Otherwise Flower gives further messages to a worker that has died. A
                        # message that came while it was restarted is served once more.
                        "max_restarts": -1,
                        "max_task_retries": 1,
                    },
                    "init_args": init_args,
                },
            )
    finally:
        job.strategy.nodes.cancelled = True
    return recorder.folder


def hurry(grid: Grid, clients: int) -> None:
    """Let Flower's simulation look for replies more often than by default.

    Every client's reply is awaited by a thread, so the more clients, the longer the interval.
    """
    from flwr.superlink.grid import InMemoryGrid

    if isinstance(grid, InMemoryGrid):
        interval = max(POLL_SECONDS, clients / LOOKS_PER_SECOND)
        grid.pull_interval = min(grid.pull_interval, interval)


@contextmanager
def _quiet_flower() -> Iterator[None]:
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


def _check_resources(engine: Any) -> None:
    """Refuse clients that can never fit: Flower would wait for a place without end."""
    cpus, gpus, where = _cluster(engine.address) if engine.address else _here()
    if engine.num_cpus > cpus:
        raise ConfigError(f"engine.num_cpus={engine.num_cpus} per client, but {where} has {cpus:g}")
    if engine.num_gpus > gpus:
        raise ConfigError(f"engine.num_gpus={engine.num_gpus} per client, but {where} has {gpus:g}")


def _here() -> tuple[float, float, str]:
    """(CPUs, GPUs, the place for an error message) of this machine."""
    import torch

    return os.cpu_count() or 1, torch.cuda.device_count(), "this machine"


def _cluster(address: str) -> tuple[float, float, str]:
    """(CPUs, GPUs, the place for an error message) of a Ray cluster."""
    import ray

    try:
        ray.init(address, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"engine.address={address}: no Ray cluster answers there: {error}"
        ) from error
    try:
        resources = ray.cluster_resources()
        return resources.get("CPU", 0.0), resources.get("GPU", 0.0), f"the cluster at {address}"
    finally:
        ray.shutdown()
