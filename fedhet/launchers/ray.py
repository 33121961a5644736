"""`hydra/launcher=ray`: each run is a task of a Ray cluster.

The nodes get the code of this process (engines/cluster.py), and each run its composed
configuration. They need the same packages, and the working directory under the same path, because
each run writes its own run folder.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from omegaconf import DictConfig

from fedhet.cli.errors import say
from fedhet.core import check
from fedhet.core.errors import ConfigError
from fedhet.core.interruptions import raise_if_interrupted
from fedhet.engines import cluster
from fedhet.launchers import live
from fedhet.launchers.jobs import JobBatch, Jobs, redirected

LISTEN_SECONDS = 0.5  # at most, until a lost interrupt is noticed
END_SECONDS = 20.0  # for runs to record that they were interrupted, before they are killed


def launch(
    jobs: Jobs, address: str | None = "auto", num_cpus: float = 1, num_gpus: float = 0
) -> list[JobReturn]:
    """Run the jobs.

    Args:
        jobs: what to run.
        address: `<host>:<port>` of a cluster's head, or "auto" for that of this machine; None
            starts a cluster on this machine.
        num_cpus: the cores that Ray reserves for a run.
        num_gpus: the GPUs, or the share of one.

    Returns:
        How each of them has ended, in their order.

    Raises:
        ConfigError: the cluster cannot be reached, or no node has room for a run.
    """
    check.number("hydra.launcher.num_cpus", num_cpus, open_low=0)
    check.number("hydra.launcher.num_gpus", num_gpus, low=0)
    needs = {"num_cpus": num_cpus, "num_gpus": num_gpus}
    if address is not None:
        nodes = cluster.reach(address, "hydra.launcher.address")
        for name, resource in (("num_cpus", "CPU"), ("num_gpus", "GPU")):
            most = max((node.get(resource, 0.0) for node in nodes), default=0.0)
            if needs[name] > most:
                raise ConfigError(
                    f"hydra.launcher.{name}={needs[name]}, but the largest node of the cluster has"
                    f" {most:g}"
                )
    import ray

    from fedhet.engines.ray import ray_arguments

    batch = jobs.batch(variables={})
    handler = signal.getsignal(signal.SIGTERM)
    with ray_arguments(address) as arguments, live.watching(len(jobs)) as watch:
        try:
            ray.init(**arguments, log_to_driver=False)
            signal.signal(signal.SIGTERM, handler)  # Ray has replaced it
            _run_all(jobs, ray.put(batch), batch, needs, watch)
        finally:
            ray.shutdown()
    if not live.shown():
        say(f"run folder: {Path(jobs.config.hydra.sweep.dir).absolute()}")
    return jobs.results()


def _run_all(
    jobs: Jobs, shared: Any, batch: JobBatch, needs: dict[str, float], watch: live.Watch
) -> None:
    import ray

    task = ray.remote(_run).options(**needs, max_retries=0)
    running: dict[Any, int] = {}
    try:
        for position, overrides in enumerate(jobs.overrides):
            number = jobs.first + position
            cfg = batch.compose(number, overrides)
            jobs.folders[position] = batch.folder_of(cfg)
            watch.begins(jobs.folders[position], jobs.label(position))
            running[task.remote(shared, number, list(overrides), cfg)] = position
        while running:
            for ref in ray.wait(list(running), timeout=LISTEN_SECONDS)[0]:
                position = running.pop(ref)
                done, problem = None, ""
                try:
                    done = ray.get(ref)
                except ray.exceptions.RayError as error:
                    first = str(error).strip().partition("\n")[0]
                    problem = f"Ray has lost it: {type(error).__name__}: {first}"
                told = jobs.ended(position, done, problem)
                if told is not None:
                    watch.ends(jobs.folders[position], jobs.label(position), told)
            raise_if_interrupted()
    except BaseException:
        for ref in running:
            ray.cancel(ref)
        until = time.monotonic() + END_SECONDS
        left = list(running)
        while left and time.monotonic() < until:
            left = ray.wait(left, timeout=LISTEN_SECONDS)[1]
        raise  # and what is left ends with this process's connection


def _run(batch: JobBatch, number: int, overrides: list[str], cfg: DictConfig) -> JobReturn:
    """Run a job on a node."""
    try:
        batch.prepare()
    except FileNotFoundError as error:
        raise ConfigError(
            f"the working directory {batch.folder} does not exist on a node of the cluster: all"
            " nodes need it under the same path"
        ) from error
    with redirected() as redirect:
        return batch.run(number, overrides, redirect, cfg)
