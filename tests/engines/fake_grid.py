"""A Grid of Flower in this process, whose nodes serve messages with real clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Event
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.common import Code, GetPropertiesRes, Status
from flwr.compat.common import recorddict_compat
from flwr.server.client_manager import SimpleClientManager

from fedhet.core.client.client import FedClient
from fedhet.core.groups import ReplyLimits
from fedhet.core.server.loop import Clock
from fedhet.data.toy import toy_task
from fedhet.flower import parcels, wire
from fedhet.flower.nodes import Nodes
from fedhet.flower.server import FlowerCourier
from fedhet.methods.scaffold import Scaffold


class FakeGrid:
    """Flower's Grid as far as a step uses it.

    Attributes:
        pulls: how often somebody has looked.
        lives: for how many seconds each message was to be kept for its node.
        schedule: client -> the look at which its reply has arrived; 1 where it is not listed.
        opened: the messages that clients were given, in which no parcel is left.
        copies: how often each reply arrives.
        errors: the clients for which Flower reports an error.
        undecodable: the clients whose replies Flower confirms, and then cannot decode.
    """

    def __init__(self, make: Callable[[], FedClient]) -> None:
        self._make = make
        self._messages: dict[str, Message] = {}
        self._pushed = 0
        self.pulls = 0
        self.lives: list[float] = []
        self.schedule: dict[int, int] = {}
        self.opened: list[Message] = []
        self.copies = 1
        self.errors: set[int] = set()
        self.undecodable: set[int] = set()
        self.alter: Callable[[int, Any], Any] = lambda pid, res: res

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            self._pushed += 1
            name = f"message-{self._pushed}"
            message.metadata.__dict__["_message_id"] = name
            self._messages[name] = message
            self.lives.append(message.metadata.ttl)
            ids.append(name)
        return ids

    def pull_messages(self, ids: Iterable[str]) -> list[Message]:
        self.pulls += 1
        wanted = [self._messages[name] for name in ids if name in self._messages]
        replies = [self._reply(message) for message in wanted]
        return [reply for reply in replies if reply is not None] * self.copies

    def _reply(self, message: Message) -> Message | None:
        pid = message.metadata.dst_node_id % 1000
        if self.pulls < self.schedule.get(pid, 1):
            return None
        del self._messages[message.metadata.message_id]
        if pid in self.undecodable:
            raise KeyError("array-chunk")
        if pid in self.errors:
            return Message(Error(code=0, reason="Node\nUnavailable"), reply_to=message)
        return parcels.open_parcel(message, Context(1, 1, {}, RecordDict(), {}), self._serve)

    def _serve(self, message: Message, context: Context) -> Message:
        self.opened.append(message)
        pid = message.metadata.dst_node_id % 1000
        client = wire.Adapter(self._make()).to_client()
        if message.metadata.message_type == "evaluate":
            ins: Any = recorddict_compat.recorddict_to_evaluateins(message.content, True)
            content = recorddict_compat.evaluateres_to_recorddict(
                self.alter(pid, client.evaluate(ins))
            )
        else:
            ins = recorddict_compat.recorddict_to_fitins(message.content, True)
            content = recorddict_compat.fitres_to_recorddict(
                self.alter(pid, client.fit(ins)), keep_input=True
            )
        return Message(content, reply_to=message)


class Proxy:
    """A node that hosts one client.

    Attributes:
        lost: so many of its first answers to who it is do not arrive, until `found` is set.
        asked: how often it was asked.
        on_asked: is called when it is asked.
    """

    def __init__(self, pid: int, total: int, grid: FakeGrid, generation: int = 0) -> None:
        self.node_id = 1000 * (generation + 1) + pid
        self.cid = str(self.node_id)
        self.grid = grid
        self.properties: dict[str, Any] = {
            "partition-id": pid,
            "num-partitions": total,
            parcels.PARCEL: True,
        }
        self.lost = self.asked = 0
        self.found = Event()
        self.on_asked: Callable[[], None] = lambda: None

    def get_properties(self, ins: Any, timeout: float | None, group_id: int) -> GetPropertiesRes:
        self.asked += 1
        self.on_asked()
        if self.asked <= self.lost:
            self.found.wait()
        return GetPropertiesRes(Status(Code.OK, ""), self.properties)


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
        self.manager = SimpleClientManager()
        for pid in range(present):
            self.join(pid)
        self.nodes = Nodes(self.run.strategy.setting.replies)
        self.courier = FlowerCourier(self.manager, self.nodes)

    def join(self, pid: int, generation: int = 0) -> Proxy:
        proxy = Proxy(pid, 4, self.grid, generation)
        self.manager.clients[proxy.cid] = proxy  # type: ignore[assignment]
        return proxy

    def leave(self, pid: int, generation: int = 0) -> None:
        del self.manager.clients[str(1000 * (generation + 1) + pid)]

    def step(self) -> dict[int, Any]:
        self.plan = self.run.plan()
        replies = list(self.courier.exchange(self.plan, Clock()))
        assert [reply.pid for reply in replies] == [msg.pid for msg in self.plan]
        self.run.settle(replies)
        return {reply.pid: reply for reply in replies}
