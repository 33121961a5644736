"""Flower's two apps: the client of one message, and the server of a run."""

from __future__ import annotations

import shlex
from functools import lru_cache
from typing import TYPE_CHECKING

from fedhet import config
from fedhet.errors import ConfigError
from fedhet.job import Job
from fedhet.process import pin_threads
from fedhet.record import terminal
from fedhet.server import Observer
from fedhet.state import Store

if TYPE_CHECKING:
    from flwr.client import Client
    from flwr.common import Context
    from flwr.server import ServerAppComponents


@lru_cache(maxsize=1)
def _site_job(overrides: tuple[str, ...], engine: str) -> Job:
    """One per process: a process that serves many messages loads its data and model once."""
    settings = config.cached(overrides)
    pin_threads(settings.cfg.engine.threads)
    return Job(settings, engine=engine)


def client_for(
    context: Context, store: Store, overrides: tuple[str, ...] | None = None, engine: str = "flwr"
) -> Client:
    """The client of one message. It hosts every partition id that its node's partition-id stands
    for."""
    try:
        properties = {
            key: int(context.node_config[key]) for key in ("partition-id", "num-partitions")
        }
    except KeyError as error:
        raise ConfigError(
            f"this SuperNode was started without {error}; give it "
            "--node-config 'partition-id=0 num-partitions=3' with its own number"
        ) from error
    return (
        _site_job(_overrides(context) if overrides is None else overrides, engine)
        .client(store, properties)
        .to_client()
    )


def server_for(context: Context) -> ServerAppComponents:
    """The server of a run under `flwr run`; its folder is named by the log's first and last
    lines."""
    terminal.log_to_stderr()
    settings = config.compose(list(_overrides(context)))
    pin_threads(settings.cfg.engine.threads)
    return components(Job(settings, engine="flwr"), terminal.log_step)


def components(job: Job, observe: Observer) -> ServerAppComponents:
    from flwr.server import ServerAppComponents, ServerConfig

    from fedhet.flower.server import FedServer

    server = FedServer(
        job.strategy, job.recorder, evaluate_clients=job.config.cfg.eval.clients, observe=observe
    )
    return ServerAppComponents(server=server, config=ServerConfig(num_rounds=job.config.cfg.rounds))


def _overrides(context: Context) -> tuple[str, ...]:
    return tuple(shlex.split(str(context.run_config.get("overrides", ""))))
