"""What Flower's two apps consist of: the client of one message, and the server of a run.

client_app.py and server_app.py in the repository's root are the apps for `flwr run`; engine=ray
builds its own (fedhet/engines/ray.py).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

from flwr.server import ServerAppComponents, ServerConfig

from fedhet import config
from fedhet.errors import ConfigError
from fedhet.flower.server import FedServer
from fedhet.job import Job
from fedhet.process import pin_threads
from fedhet.record import terminal
from fedhet.server import Observer
from fedhet.state import Store

if TYPE_CHECKING:
    from flwr.client import Client
    from flwr.common import Context


def client_for(context: Context, store: Store, make_job: Callable[[], Job] | None = None) -> Client:
    """The client of one message, which may be for any of the clients that its node hosts.

    Args:
        context: Flower's context of the node.
        store: where the clients' states are.
        make_job: returns the job of this process; None builds it from the run config.

    Raises:
        ConfigError: the node was started without partition-id or num-partitions.
    """
    try:
        properties = {
            key: int(context.node_config[key]) for key in ("partition-id", "num-partitions")
        }
    except KeyError as error:
        raise ConfigError(
            f"this SuperNode was started without {error}; give it"
            " --node-config 'partition-id=0 num-partitions=3' with its own number"
        ) from error
    job = make_job() if make_job else _cached_job(_overrides(context))
    return job.client(store, properties).to_client()


@lru_cache(maxsize=1)
def _cached_job(overrides: tuple[str, ...]) -> Job:
    """The job of this process, so that it loads data and model once for all its messages."""
    settings = config.cached(overrides)
    pin_threads(settings.cfg.engine.threads)
    return Job(settings, engine="flwr")


def server_for(context: Context) -> ServerAppComponents:
    """The server of a run under `flwr run`; the first and last lines of its log name the folder."""
    terminal.log_to_stderr()
    settings = config.compose(list(_overrides(context)))
    pin_threads(settings.cfg.engine.threads)
    return components(Job(settings, engine="flwr"), terminal.log_step)


def components(job: Job, observe: Observer) -> ServerAppComponents:
    """The server of a run as Flower wants it; FedServer replaces the number of rounds."""
    evaluate_clients = job.config.cfg.eval.clients
    server = FedServer(
        job.strategy, job.recorder, evaluate_clients=evaluate_clients, observe=observe
    )
    return ServerAppComponents(server=server, config=ServerConfig(num_rounds=job.config.cfg.rounds))


def _overrides(context: Context) -> tuple[str, ...]:
    """The overrides in the run config, which is one string."""
    return tuple(shlex.split(str(context.run_config.get("overrides", ""))))
