"""Flower's side: a method in an app of one's own, and what carries fedhet's own runs.

    strategy = fedhet.flower.strategy("scaffold", task(), plugins=["fednorm"])
    app = fedhet.flower.client_app("scaffold", task, plugins=["fednorm"])

docs/flower.md is such an app.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flwr.client import Client, ClientApp
    from flwr.common import Context
    from torch import Tensor

    from fedhet.core.server.strategy import FedStrategy
    from fedhet.core.task import Task
    from fedhet.job import Job


def strategy(
    method: str,
    task: Task,
    *,
    plugins: Sequence[str] = (),
    overrides: Sequence[str] = (),
    at_end: Callable[[dict[str, Tensor], list[dict[str, Any]]], None] | None = None,
) -> FedStrategy:
    """A method as a strategy for Flower's own `ServerApp` and `Server`.

    Its `num_rounds` counts the rounds of phases before the training, too. The first round waits
    until all nodes have joined (`replies.join`, `replies.min_nodes`).

    Args:
        method: its name in the configuration.
        task: model, criterion and the clients, of whom the server needs the training sizes, or
            their number alone: then it believes each node's own size. Without a global test set
            the server evaluates nothing.
        plugins: the names of plug-ins.
        overrides: settings as on the command line, such as "rounds=5" and "client.lr=0.1".
        at_end: is called once after the last round, with the global model's state dict and the
            history, in which each step is a dictionary as in rounds.jsonl. Of a method without a
            global model (FedBN, ...) the state dict has what the clients share, and lacks the
            rest. An exception in it ends the run.

    Raises:
        ConfigError: the settings do not fit together, or not the task.
    """
    from fedhet.flower.adapter import StrategyAdapter
    from fedhet.privacy.account import Account

    job = _job(method, task, plugins, overrides)
    noise = job.workspace.noise
    StrategyAdapter(job.strategy, [Account(noise)] if noise else [], at_end)
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
        task: makes the task of a node. Its `clients` are the `ClientData` of the node's own client,
            or all clients in order, of whom the node takes its own: number `partition-id` of
            `num-partitions` in `context.node_config`.
        plugins: the names of plug-ins, as for `strategy`.
        overrides: the same settings as for `strategy`.
    """
    from flwr.client import ClientApp

    from fedhet.core.task import PARTS
    from fedhet.flower import wire
    from fedhet.flower.nodes import place_of
    from fedhet.process import pin_threads
    from fedhet.stores import ContextStore

    def client_fn(context: Context) -> Client:
        place = place_of(context.node_config)
        pid, clients = place.values()
        job = _job(method, task(context).at(pid, clients), plugins, overrides)
        pin_threads(job.config.run.engine.threads)
        sizes = dict(zip(PARTS, job.task.part_sizes[pid], strict=True))
        client = job.client(ContextStore(context.state), {**place, **sizes})
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
