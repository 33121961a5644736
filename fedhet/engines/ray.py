"""Flower's simulation on Ray, with one node per client.

Each client's state travels in its node's context.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from fedhet.config import Config
from fedhet.config.settings import Engine
from fedhet.core.errors import ConfigError
from fedhet.engines import cluster
from fedhet.engines.guard import TemporaryFolder
from fedhet.engines.simulation import Simulation, quiet_flower
from fedhet.stores import ContextStore

if TYPE_CHECKING:
    from flwr.client import Client
    from flwr.common import Context

    from fedhet.job import Job


def run(job: Job) -> Path:
    """Run the job under Ray: on a cluster of its own, or on the one that engine.address names.

    Raises:
        ConfigError: the cluster does not answer or refuses us, or no client can ever fit.
        RunFailed: a client failed and on_failure is "stop", or no client succeeded.
    """
    from flwr.server import ServerApp

    from fedhet.flower.apps import components
    from fedhet.job import begin

    engine = job.config.run.engine
    _check_resources(engine)
    loop = begin(job)
    with (
        quiet_flower(),
        ray_arguments(engine.address) as init_args,
        Simulation(
            _client_fn(job.config),
            len(job.task.sizes),
            resources={"num_cpus": engine.num_cpus, "num_gpus": engine.num_gpus},
            replaced=engine.address is None,  # elsewhere that could wait for a machine that is lost
            init_args=init_args,
            nodes=job.nodes,
        ) as simulation,
        loop.ending(),
    ):
        server = ServerApp(server_fn=lambda context: components(job, loop, simulation.states))
        server(*simulation.nodes())
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
    with cluster.runtime_env() as environment:
        yield {"address": address, "logging_level": logging.ERROR, "runtime_env": environment}


# ---- in the processes of the clients
def _client_fn(config: Config) -> Callable[[Context], Client]:
    """What serves a message; Ray sends this function to the clients' processes.

    They get the composed configuration, because the files from which it was composed need not
    exist on their machine.
    """
    settings = json.dumps(
        {
            "cfg": OmegaConf.to_container(config.cfg),
            "choices": config.choices,
            "overrides": config.overrides,
        }
    )
    folder = str(Path.cwd())

    def client_fn(context: Context) -> Client:
        from fedhet.flower.apps import client_for

        return client_for(context, ContextStore(context.state), partial(_job, settings, folder))

    return client_fn


@lru_cache(maxsize=1)
def _job(settings: str, folder: str) -> Job:
    """The job of this process, so that it loads data and model once for all its messages."""
    from fedhet.job import Job
    from fedhet.process import pin_threads

    if Path(folder).is_dir():
        os.chdir(folder)  # relative paths in the configuration are relative to the server's folder
    content = json.loads(settings)
    cfg = OmegaConf.create(content["cfg"])
    OmegaConf.set_readonly(cfg, True)
    config = Config(cfg, content["choices"], "", False, tuple(content["overrides"]))
    pin_threads(config.run.engine.threads)
    return Job(config, engine="ray")


def _check_resources(engine: Engine) -> None:
    """Refuse clients that can never fit: Flower would wait for a place without end."""
    if engine.address is None:
        nodes, where = [_here()], "this machine has"
    else:
        nodes, where = cluster.reach(engine.address), "the largest node of the cluster has"
    asked = {"num_cpus": engine.num_cpus, "num_gpus": engine.num_gpus}
    for (setting, wanted), resource in zip(asked.items(), ("CPU", "GPU"), strict=True):
        most = max((node.get(resource, 0.0) for node in nodes), default=0.0)
        if wanted > most:
            raise ConfigError(f"engine.{setting}={wanted} per client, but {where} {most:g}")


def _here() -> dict[str, float]:
    """The resources of this machine, as Ray names them."""
    import torch

    return {"CPU": os.cpu_count() or 1, "GPU": torch.cuda.device_count()}
