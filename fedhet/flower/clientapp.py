"""The clients of a method in an app with `@app.train()` and `@app.evaluate()`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from flwr.app import Context, Message
from flwr.client import NumPyClient

from fedhet.core.client.client import FedClient
from fedhet.core.client.state import Store
from fedhet.core.errors import ConfigError
from fedhet.core.limits import Limits
from fedhet.core.task import Task
from fedhet.flower import apps, wire
from fedhet.flower.grid import ASKS, CONFIG
from fedhet.flower.nodes import OWN_LOOP, place_of
from fedhet.flower.own_loop import OwnersSite, OwnLoop, check_own_loop
from fedhet.flower.tasks import job_of, told_of
from fedhet.runs.config import Config
from fedhet.runs.stores import store_at_site


def client_of(
    message: Message,
    context: Context,
    task: Task | Callable[[Context], Task],
    loop: OwnLoop | None,
) -> NumPyClient:
    """The client that serves a message of a `Strategy`.

    Args:
        message, context: as Flower gives them.
        task: as for `fedhet.flower.train`.
        loop: the owner's training loop; None for fedhet's.

    Raises:
        ConfigError, DataError, ImportError, OSError: the message is of something else, the node's
            configuration is wrong, or this machine cannot serve the run.
    """
    client = client_at(context, apps.settings_in(message), task, store_at_site)
    config = dict(message.content.config_records.get(CONFIG, {}))
    if loop is None and config and ASKS in message.content:
        raise ConfigError(
            f"train_config={config} has no effect without a training loop of your own: give its"
            " settings to fedhet.flower.Strategy, such as overrides=['client.lr=0.1']"
        )
    if loop is not None:
        check_own_loop(client.method, client.plugins)
        client.site_of = partial(OwnersSite, loop=loop, config=config)
        client.properties[OWN_LOOP] = True
    return client


def client_at(
    context: Context,
    settings: Config,
    task: Task | Callable[[Context], Task],
    store: Store | Callable[[str], Store],
) -> FedClient:
    """The client of a node that has one.

    Args:
        context: Flower's context of the node.
        settings: the run's.
        task: as for `fedhet.flower.train`.
        store: where the client's state is.

    Raises:
        ConfigError, DataError: the settings do not fit the node, or not the task.
    """
    place = place_of(context.node_config)
    apps.check_threads(settings)
    whole = task(context) if callable(task) else task
    job = job_of(settings, whole.at(*place.values()), Limits.of(context.node_config))
    with apps.foreign():
        client = job.client(store, told_of(job, place))
    wire.Adapter(client)
    return client
