"""Flower's side: a method in an app of one's own, and what carries fedhet's own runs.

In an app with Flower's `@app.main()`, `@app.train()` and `@app.evaluate()`:

    result = fedhet.flower.Strategy("fednorm", task(clients)).start(grid)
    reply = fedhet.flower.train(msg, context, task)
    reply = fedhet.flower.evaluate(msg, context, task)

In one with `ServerApp(server_fn=...)` and `ClientApp(client_fn=...)`:

    strategy = fedhet.flower.strategy("scaffold", task(), plugins=["fednorm"])
    app = fedhet.flower.client_app("scaffold", task, plugins=["fednorm"])

docs/flower.md has both.

It may import core, data and runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.client import Client, ClientApp
    from flwr.common import Context
    from torch import Tensor

    from fedhet.core.server.strategy import FedStrategy
    from fedhet.core.task import Task
    from fedhet.flower.own_loop import OwnLoop
    from fedhet.flower.serverapp import Strategy

__all__ = ["Strategy", "client_app", "evaluate", "strategy", "train"]


def __getattr__(name: str) -> Any:
    if name != "Strategy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fedhet.flower.serverapp import Strategy

    return Strategy


def train(
    msg: Message,
    context: Context,
    task: Task | Callable[[Context], Task],
    loop: OwnLoop | None = None,
) -> Message:
    """Serve a message to the train function of an app whose server runs a `Strategy`.

    The node has one client. What the client remembers is in files of this machine, so that it
    outlives Flower's processes.

    Args:
        msg, context: as Flower gives them.
        task: the task of the node, or what makes it. Its `clients` are the `ClientData` of the
            node's own client, or all clients in order, of whom the node takes its own: number
            `partition-id` of `num-partitions` in `context.node_config`.
        loop: your own training, (model, data, config) -> metrics, in place of fedhet's: it trains
            the model in place, and returns numbers by name, one number ("train_loss") or None.
            `data` is a TensorDataset of the client's training samples; `config` has "server-round",
            "lr", "local-epochs" and "batch-size" of the run, and what `Strategy.start` was given as
            `train_config`. A method that needs local steps of fedhet's refuses it, before the first
            round if its class says so.
    """
    from fedhet.flower.apps import answer, client_of

    return answer(msg, context, lambda: client_of(msg, context, task, loop))


def evaluate(msg: Message, context: Context, task: Task | Callable[[Context], Task]) -> Message:
    """Serve a message to the evaluate function of such an app: score the client's models.

    Args:
        msg, context, task: as for `train`.
    """
    return train(msg, context, task)


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
    from fedhet.flower.serverapp import accounts, job_of, lines_of, settings_of

    job = job_of(settings_of(lines_of(method, plugins, overrides)), task)
    StrategyAdapter(job.strategy, accounts(job), at_end)
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

    from fedhet.flower import wire
    from fedhet.flower.apps import client_at
    from fedhet.flower.serverapp import lines_of, settings_of
    from fedhet.runs.stores import ContextStore

    lines = lines_of(method, plugins, overrides)

    def client_fn(context: Context) -> Client:
        settings = settings_of(lines)
        client = client_at(context, settings, task, ContextStore(context.state))
        return wire.Adapter(client).to_client()

    return ClientApp(client_fn=client_fn)
