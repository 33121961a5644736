"""Flower's side: methods in a Flower app of your own, and the transport of fedhet's own runs.

In an app with Flower's `@app.main()`, `@app.train()` and `@app.evaluate()`:

    result = fedhet.flower.Strategy("fednorm", task(clients)).start(grid)
    reply = fedhet.flower.train(msg, context, task)
    reply = fedhet.flower.evaluate(msg, context, task)

In an app with `ServerApp(server_fn=...)` and `ClientApp(client_fn=...)`:

    strategy = fedhet.flower.strategy("scaffold", task(), plugins=["fednorm"])
    app = fedhet.flower.client_app("scaffold", task, plugins=["fednorm"])

docs/flower.md describes both.

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
    """Answer a message to the train function of an app. The app's server must run a `Strategy`.

    The node has one client. The client keeps its state in files on this machine, so that the state
    outlives Flower's processes.

    Args:
        msg, context: from Flower.
        task: the task of the node, or a function of `context` that returns it. Its `clients` are
            either the `ClientData` of the node's own client, or all clients in order; then the node
            takes client `partition-id` of `num-partitions` (both in `context.node_config`).
        loop: your own training loop, which replaces fedhet's: a function of (model, data, config).
            It trains the model in place, and returns numbers by name, one number (recorded as
            "train_loss") or None. `data` is a TensorDataset of the client's training samples.
            `config` has the run's "server-round", "lr", "local-epochs" and "batch-size", and the
            `train_config` of `Strategy.start`. A method that needs fedhet's local steps refuses the
            loop; if its class declares this need, it does so before the first round.
    """
    from fedhet.flower.apps import answer, client_of

    return answer(msg, context, lambda: client_of(msg, context, task, loop))


def evaluate(msg: Message, context: Context, task: Task | Callable[[Context], Task]) -> Message:
    """Answer a message to the evaluate function of such an app: score the client's models.

    Args:
        msg, context, task: see `train`.
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
    """Return a method as a strategy for Flower's own `ServerApp` and `Server`.

    Its `num_rounds` includes the rounds of phases before the training. The first round waits
    until all nodes have joined (`replies.join`, `replies.min_nodes`).

    Args:
        method: its name in the configuration.
        task: model, criterion and clients. The server needs the clients' training sizes. If it gets
            only the number of clients, it trusts the size that each node reports. Without a global
            test set the server evaluates nothing.
        plugins: the names of plug-ins.
        overrides: settings as on the command line, such as "rounds=5" and "client.lr=0.1".
        at_end: a function that is called once, after the last round. It gets the global model's
            state dict and the history (each step is a dictionary as in rounds.jsonl). If a method
            has no global model (FedBN, ...), the state dict has only the tensors that clients
            share. An exception in `at_end` ends the run.

    Raises:
        ConfigError: the settings contradict each other or the task.
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
    """Return the clients of a method as a Flower `ClientApp`, for nodes with one client each.

    Each client keeps its state in Flower's `Context.state`.

    Args:
        method: its name in the configuration; the same as for `strategy`.
        task: a function of Flower's context that returns the task of a node; its `clients` are as
            in `train`.
        plugins: the names of plug-ins; the same as for `strategy`.
        overrides: the same settings as for `strategy`.
    """
    from flwr.client import ClientApp

    from fedhet.flower import wire
    from fedhet.flower.apps import client_at
    from fedhet.flower.serverapp import lines_of, settings_of
    from fedhet.runs.stores import ContextStore

    lines = lines_of(method, plugins, overrides)

    def client_fn(context: Context) -> Client:
        client = client_at(context, settings_of(lines), task, ContextStore(context.state))
        return wire.Adapter(client).to_client()

    return ClientApp(client_fn=client_fn)
