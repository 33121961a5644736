"""Flower's side: a method in an app of one's own, and what carries fedhet's own runs.

    strategy = fedhet.flower.strategy("scaffold", task(), plugins=["fednorm"])
    app = fedhet.flower.client_app("scaffold", task, plugins=["fednorm"])

docs/flower.md is such an app.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flwr.client import Client, ClientApp
    from flwr.common import Context

    from fedhet.core.strategy import FedStrategy
    from fedhet.core.task import Task
    from fedhet.job import Job


def strategy(
    method: str, task: Task, *, plugins: Sequence[str] = (), overrides: Sequence[str] = ()
) -> FedStrategy:
    """A method as a strategy for Flower's own `ServerApp` and `Server`.

    Its `num_rounds` counts the rounds of phases before the training, too; `weights["model"]` has
    the global model.

    Args:
        method: its name in the configuration.
        task: model, criterion and the clients' data, of which the server reads the sizes and the
            global test set.
        plugins: the names of plug-ins.
        overrides: settings as on the command line, such as "rounds=5" and "client.lr=0.1".

    Raises:
        ConfigError: the settings do not fit together, or not the task.
    """
    from fedhet.flower.adapter import StrategyAdapter
    from fedhet.privacy.account import Account

    job = _job(method, task, plugins, overrides)
    noise = job.workspace.noise
    StrategyAdapter(job.strategy, [Account(noise)] if noise else [])
    return job.strategy


def client_app(
    method: str,
    task: Callable[[Context], Task],
    *,
    plugins: Sequence[str] = (),
    overrides: Sequence[str] = (),
) -> ClientApp:
    """The clients of a method as a Flower `ClientApp`, for nodes with one client each.

    What a client remembers is kept in Flower's `Context.state`.

    Args:
        method: its name in the configuration, as for `strategy`.
        task: makes the task of a node; only the data of the node's own client are read.
        plugins: the names of plug-ins, as for `strategy`.
        overrides: the same settings as for `strategy`.
    """
    from flwr.client import ClientApp

    from fedhet.core.errors import ConfigError
    from fedhet.flower import wire
    from fedhet.process import pin_threads
    from fedhet.stores import ContextStore

    def client_fn(context: Context) -> Client:
        job = _job(method, task(context), plugins, overrides)
        pin_threads(job.config.run.engine.threads)
        node = {key: int(context.node_config[key]) for key in ("partition-id", "num-partitions")}
        clients = len(job.task.sizes)
        if node["num-partitions"] != clients:
            raise ConfigError(
                f"{node['num-partitions']} SuperNodes for {clients} clients; the clients of"
                " fedhet.flower.client_app have a node each"
            )
        client = job.client(ContextStore(context.state), dict(node))
        return wire.Adapter(client).to_client()

    return ClientApp(client_fn=client_fn)


def _job(method: str, task: Task, plugins: Sequence[str], overrides: Sequence[str]) -> Job:
    from fedhet import config
    from fedhet.data.given import check_settings, check_task
    from fedhet.job import Job

    chosen = [f"method={method}", *([f"plugin=[{','.join(plugins)}]"] if plugins else [])]
    settings = config.cached((*chosen, *overrides))
    check_settings(settings)
    job = Job(settings, task, "flwr")  # its clients may be real ones
    check_task(job.workspace)
    return job
