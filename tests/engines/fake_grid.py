"""A Grid of Flower in this process, whose nodes serve messages with real clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import ConfigRecord, Error, Message, RecordDict

from fedhet.core.client.client import FedClient
from fedhet.core.groups import ReplyLimits
from fedhet.core.server.loop import Clock
from fedhet.data.toy import toy_task
from fedhet.flower import apps, wire
from fedhet.flower.nodes import Nodes
from fedhet.flower.transport import ASKS, FlowerTransport, GridMembers
from fedhet.methods.scaffold import Scaffold


class FakeGrid:
    """Flower's Grid as far as a run uses it.

    Attributes:
        nodes: those that are connected, by id.
        pulls: how often somebody has looked.
        lives: for how many seconds each message was to be kept for its node.
        schedule: client -> the look at which its reply has arrived; 1 where it is not listed.
        copies: how often each reply arrives.
        errors: the clients for which Flower reports an error.
        undecodable: the clients whose replies Flower confirms, and then cannot decode.
    """

    def __init__(self, make: Callable[[], FedClient]) -> None:
        self._make = make
        self.nodes: dict[int, Node] = {}
        self._messages: dict[str, Message] = {}
        self._pushed = 0
        self.pulls = 0
        self.lives: list[float] = []
        self.schedule: dict[int, int] = {}
        self.copies = 1
        self.errors: set[int] = set()
        self.undecodable: set[int] = set()
        self.alter: Callable[[int, Any], Any] = lambda pid, res: res

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            self._pushed += 1
            name = f"message-{self._pushed}"
            message.metadata.__dict__["_message_id"] = name
            self._messages[name] = message
            if ASKS not in message.content:
                self.lives.append(message.metadata.ttl)
            ids.append(name)
        return ids

    def pull_messages(self, ids: Iterable[str]) -> list[Message]:
        wanted = [self._messages[name] for name in ids if name in self._messages]
        self.pulls += any(ASKS not in message.content for message in wanted)
        replies = [self._reply(message) for message in wanted]
        return [reply for reply in replies if reply is not None] * self.copies

    def _reply(self, message: Message) -> Message | None:
        pid = message.metadata.dst_node_id % 1000
        if ASKS in message.content:
            return self._told(message)
        if self.pulls < self.schedule.get(pid, 1):
            return None
        del self._messages[message.metadata.message_id]
        if pid in self.undecodable:
            raise KeyError("array-chunk")
        if pid in self.errors:
            return Message(Error(code=0, reason="Node\nUnavailable"), reply_to=message)
        client = self._make()
        wire.Adapter(client)
        content = self.alter(pid, apps.served(client, message.content))
        return Message(content, reply_to=message)

    def _told(self, message: Message) -> Message | None:
        name, node = message.metadata.message_id, self.nodes.get(message.metadata.dst_node_id)
        if node is None or node.leaves:
            self.nodes.pop(message.metadata.dst_node_id, None)
            del self._messages[name]
            return Message(Error(code=0, reason="Node Unavailable"), reply_to=message)
        if name not in node.asked:
            node.asked.append(name)
        if name in node.asked[: node.lost] and not node.found:
            return None
        del self._messages[name]
        return Message(RecordDict({ASKS: ConfigRecord(node.properties)}), reply_to=message)


class Node:
    """A node that hosts one client.

    Attributes:
        node_id: its id in Flower.
        properties: what it tells of itself.
        lost: so many of its first answers do not arrive, until `found` is set.
        leaves: whether it leaves as soon as it is asked.
        asked: the questions who it is.
    """

    def __init__(self, pid: int, total: int, generation: int = 0) -> None:
        self.node_id = 1000 * (generation + 1) + pid
        self.properties: dict[str, Any] = {"partition-id": pid, "num-partitions": total}
        self.lost = 0
        self.found = self.leaves = False
        self.asked: list[str] = []


class OnGrid:
    """A federation of four clients, each on a node of its own."""

    def __init__(self, federation: Callable[..., Any], present: int = 4, **limits: Any) -> None:
        self.run = federation(
            toy_task(4),
            Scaffold,
            on_failure="skip",
            rounds=5,
            replies=ReplyLimits(**{"grace": 0.0, "join": 0.0, **limits}),
        )
        self.grid = FakeGrid(self.run.client)
        for pid in range(present):
            self.join(pid)
        self.nodes = Nodes(self.run.strategy.setup.replies)
        self.transport = FlowerTransport(GridMembers(self.grid), self.nodes)

    def join(self, pid: int, generation: int = 0) -> Node:
        node = Node(pid, 4, generation)
        self.grid.nodes[node.node_id] = node
        return node

    def leave(self, pid: int, generation: int = 0) -> None:
        del self.grid.nodes[1000 * (generation + 1) + pid]

    def step(self) -> dict[int, Any]:
        self.plan = self.run.plan()
        replies = list(self.transport.exchange(self.plan, Clock()))
        assert [reply.pid for reply in replies] == [msg.pid for msg in self.plan]
        self.run.finish_step(replies)
        return {reply.pid: reply for reply in replies}
