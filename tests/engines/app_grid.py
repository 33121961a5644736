"""A Grid of Flower in this process, whose nodes execute a ClientApp with @app.train()."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid


class AppGrid(Grid):
    """The nodes of a simulation, of which each reply arrives when somebody looks for it.

    Attributes:
        contexts: node id -> its context, whose partition-id is the number of its client.
        heard: (partition-id, group) of each message of a step or an evaluation, by type.
        silent: partitions whose replies never arrive.
    """

    lock = threading.Lock()  # nodes of one process share torch's generator

    def __init__(self, app: ClientApp, nodes: int = 4, first: int = 70) -> None:
        self.app = app
        self.contexts = {
            first - pid: Context(
                1, first - pid, {"partition-id": pid, "num-partitions": nodes}, RecordDict(), {}
            )
            for pid in range(nodes)
        }
        self.heard: list[tuple[str, int, str]] = []
        self.silent: set[int] = set()
        self._numbers = itertools.count()
        self._waiting: dict[str, Message] = {}

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterator[str]:
        names = []
        for message in messages:
            name = f"message-{next(self._numbers)}"
            message.metadata.__dict__["_message_id"] = name
            self._waiting[name] = deepcopy(message)
            names.append(name)
        return iter(names)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        due = [name for name in message_ids if name in self._waiting]
        replies = [self._reply(name, self._waiting[name]) for name in due]
        return [reply for reply in replies if reply is not None]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))

    def _reply(self, name: str, message: Message) -> Message | None:
        context = self.contexts[message.metadata.dst_node_id]
        pid = int(context.node_config["partition-id"])
        about = message.metadata
        if pid in self.silent and about.group_id:
            return None
        del self._waiting[name]
        if about.group_id:
            self.heard.append((about.message_type, pid, about.group_id))
        try:
            with self.lock:
                return deepcopy(self.app(message, context))
        except Exception as error:  # noqa: BLE001 -- as a SuperNode does
            return Message(Error(code=0, reason=str(error)), reply_to=message)

    # ---- what a strategy does not use
    @property
    def run(self) -> Any:
        return None

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    def create_message(self, *args: Any, **how: Any) -> Message:
        raise NotImplementedError
