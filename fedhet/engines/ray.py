"""Flower's own simulation on Ray: one SuperNode per client, so each client's state travels in its
node's context."""

from __future__ import annotations

import logging
import os
import warnings
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


def run(job: Job) -> Path:
    """Run the job under Ray, on an existing cluster where engine.address names one."""
    from flwr.client import ClientApp
    from flwr.server import ServerApp
    from flwr.simulation import run_simulation

    from fedhet.flower.apps import components

    class App(ServerApp):
        def __call__(self, grid: Grid, context: Context) -> None:
            hurry(grid, len(job.task.sizes))
            super().__call__(grid, context)

    engine = job.config.cfg.engine
    _check_resources(engine)
    recorder = job.recorder
    overrides = job.config.overrides

    def client_fn(context: Context) -> Client:
        from fedhet.flower.apps import client_for

        return client_for(context, ContextStore(context.state), overrides, "ray")

    logger = logging.getLogger("flwr")  # Flower's own lines would bury the progress; warnings stay
    level = logger.level
    logger.setLevel(logging.WARNING)
    logger.addFilter(_not_deprecation)
    warnings.filterwarnings(
        "ignore", message=".*RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", category=FutureWarning
    )
    init_args: dict[str, Any] = (
        {"address": engine.address} if engine.address else {"include_dashboard": False}
    )
    try:
        with job.progress() as observe:
            run_simulation(
                App(server_fn=lambda context: components(job, observe)),
                ClientApp(client_fn=client_fn),
                num_supernodes=len(job.task.sizes),
                backend_config={
                    "client_resources": {"num_cpus": engine.num_cpus, "num_gpus": engine.num_gpus},
                    "init_args": init_args,
                },
            )
    finally:
        job.strategy.nodes.cancelled = True
        logger.setLevel(level)
        logger.removeFilter(_not_deprecation)
    return recorder.folder


def hurry(grid: Grid, clients: int) -> None:
    """Let Flower's simulation look for replies more often than it does by itself, if clients are
    few.

    Each waits in a thread of its own that looks: 5000 looks a second take a quarter of a core.
    """
    from flwr.superlink.grid import InMemoryGrid

    if isinstance(grid, InMemoryGrid):
        grid.pull_interval = min(grid.pull_interval, max(POLL_SECONDS, clients / 5000))


def _not_deprecation(line: logging.LogRecord) -> bool:
    """Flower prints half a page on its `run_simulation`, which still is the only way to run a
    simulation in a process."""
    return not str(line.msg).startswith("DEPRECATED FEATURE")


def _check_resources(engine: Any) -> None:
    """Flower waits for ever on a backend that cannot start one client, so what can never fit is
    refused here."""
    cpus, gpus, where = _cluster(engine.address) if engine.address else _here()
    if engine.num_cpus > cpus:
        raise ConfigError(f"engine.num_cpus={engine.num_cpus} per client, but {where} has {cpus:g}")
    if engine.num_gpus > gpus:
        raise ConfigError(f"engine.num_gpus={engine.num_gpus} per client, but {where} has {gpus:g}")


def _here() -> tuple[float, float, str]:
    import torch

    return os.cpu_count() or 1, torch.cuda.device_count(), "this machine"


def _cluster(address: str) -> tuple[float, float, str]:
    import ray

    try:
        ray.init(address, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"engine.address={address}: no Ray cluster answers there: {error}"
        ) from error
    try:
        found = ray.cluster_resources()
        return found.get("CPU", 0.0), found.get("GPU", 0.0), f"the cluster at {address}"
    finally:
        ray.shutdown()
