"""The transport of a step through Flower's public Grid.

It finds the connected nodes, asks them who they are, sends messages and collects replies. Each
message has the record of packing.py and the record of the run's settings. In a user's own app a
third record has the owner's settings for their training loop.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from math import inf

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedhet.core.client.client import KEEP
from fedhet.core.errors import Rejected, clean, log
from fedhet.core.groups import ReplyLimits
from fedhet.core.messages import EVALUATE, Broadcast, Failure, Reply, Upload, payload
from fedhet.core.server.loop import Clock
from fedhet.flower import packing, wire
from fedhet.flower.nodes import Answer, Nodes
from fedhet.runs.config import Config, sent

CLOCKS_SECONDS = 5  # the difference that Flower allows between the clocks of its machines
# Added to the deadline of a node's first message in a run, because the node then imports fedhet and
# reads its data.
START_SECONDS = 120.0
# After so many seconds of a step, the log names the clients without a reply. It names them again
# after twice as many seconds, and so on.
PATIENCE = 180.0

SETTINGS = "fedhet.settings"  # the record with the run's settings, and the settings' key in it
CONFIG = "config"  # Flower's name for the record with the owner's train_config
ASKS = "fedhet.asks"  # the record of the question who a node is, and of the answer
RAISED = 2  # Flower's code of an error that an app at a node has raised
AGAIN_SECONDS = 30.0  # a silent node is asked again after this time, then after twice this time
# Seconds between two looks for replies in a simulation, and the shortest and longest over HTTP.
NEAR_SECONDS = 0.02
LOOKS_PER_SECOND = 5000  # for one client in a simulation; fewer in proportion for more clients
FAR_SECONDS = (0.1, 1.0)


def settings_records(
    settings: Config, config: Mapping[str, object] | None = None
) -> dict[str, ConfigRecord]:
    """Return the records that every message of a run has in addition to its content.

    Args:
        settings: the run's settings.
        config: the owner's settings for their own training loop.
    """
    run = {SETTINGS: ConfigRecord({SETTINGS: sent.written(settings)})}
    return {**run, CONFIG: ConfigRecord(dict(config))} if config else run  # type: ignore[arg-type]


@dataclass(frozen=True)
class GridMembers:
    """The connected nodes, from a Grid.

    Attributes:
        grid: the Grid.
        records: the records that every message to a node includes.
    """

    grid: Grid
    records: Mapping[str, ConfigRecord] = field(default_factory=dict)

    def ids(self) -> set[str]:
        """The nodes that are connected now."""
        return set(map(str, self.grid.get_node_ids()))

    def ask(self, ids: Collection[str], seconds: float) -> Iterator[tuple[str, Answer]]:
        """Ask nodes who they are, with messages to their `train` function: every app has one.

        A silent node is asked again: if the SuperLink could not take a reply, the SuperNode does
        not repeat it. The node's first answer counts.

        Args:
            ids: the nodes.
            seconds: how long to wait for answers.
        """
        silent, asked = dict.fromkeys(ids), dict[str, str]()
        again = began = time.monotonic()
        pause, looks = AGAIN_SECONDS, count()
        while silent and (left := began + seconds - time.monotonic()) > 0:
            if time.monotonic() >= again:
                if again > began:
                    log.info("asking %d of %d nodes again who they are", len(silent), len(ids))
                content = RecordDict({ASKS: ConfigRecord(), **self.records})
                names = self.grid.push_messages(
                    [Message(content, int(node), MessageType.TRAIN, ttl=left) for node in silent]
                )
                asked |= dict(zip(names, silent, strict=True))
                again, pause = again + pause, 2 * pause
            replies = list(pulled(self.grid, [name for name in asked if name]))
            for name, reply in replies:
                node = asked.pop(name, "")
                if node in silent:
                    del silent[node]
                    yield node, read_answer(reply)
            if not replies:
                time.sleep(min(pause_of(self.grid, len(ids), next(looks)), left))


def read_answer(reply: Message | Rejected) -> Answer:
    """Return a node's properties, or the reason why there are none."""
    if isinstance(reply, Rejected):
        return str(reply)
    if reply.has_error():
        return str(reply.error.reason)
    properties = reply.content.config_records.get(ASKS)
    return "its app does not answer the question" if properties is None else dict(properties)


def pulled(grid: Grid, names: list[str]) -> Iterator[tuple[str, Message | Rejected]]:
    """Yield the replies that have arrived, each with the id of the message that it answers.

    Replies from other machines are pulled one at a time. Otherwise one undecodable reply would lose
    all others of the same pull.
    """
    for group in [names] if near(grid) else [[name] for name in names]:
        try:
            found = list(grid.pull_messages(group))
        except packing.UNDECODABLE as error:
            if len(group) > 1:
                raise
            problem = f"Flower cannot decode it: {type(error).__name__}: {error}"
            yield group[0], Rejected("unreadable", problem)
            continue
        for reply in found:
            yield reply.metadata.reply_to_message_id, reply


def near(grid: Grid) -> bool:
    """Whether the replies are in this process already, as in a simulation."""
    return run_of(grid, "primary_task_type") == "flwr-simulation"


@lru_cache(maxsize=4)  # a Grid queries a database each time
def run_of(grid: Grid, name: str) -> str:
    """Return an attribute of the Grid's run as a text, or "" if there is none."""
    return str(getattr(getattr(grid, "run", None), name, ""))


def pause_of(grid: Grid, clients: int, looks: int) -> float:
    """Return the seconds until the next look for replies, after `looks` looks without success."""
    if near(grid):
        return max(NEAR_SECONDS, clients / LOOKS_PER_SECOND)
    low, high = FAR_SECONDS
    return float(min(high, low * 1.1 ** min(looks, 100)))


# ---- a step
@dataclass
class GridExchange:
    """The messages of one step that are under way.

    Attributes:
        asked: message id -> (the message, its node).
        until: when the server stops waiting for replies, on the monotonic clock.
        why: (cause, reason) of the failure of clients that have not replied by then.
        enough: the number of replies after which the server waits only `grace` seconds longer.
        held: client -> its reply, if the reply arrived before its turn.
        began: when the messages were sent, on the monotonic clock.
    """

    asked: dict[str, tuple[Broadcast, int]]
    until: float
    why: tuple[str, str]
    enough: int | None
    grace: float
    held: dict[int, Reply] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    arrived: int = 0
    patience: float = field(default_factory=lambda: PATIENCE)

    def hold(self, reply: Reply) -> None:
        self.held[reply.pid] = reply
        self.arrived += isinstance(reply, Upload)
        closing = time.monotonic() + self.grace
        if self.arrived == self.enough and closing < self.until:
            cause = f"{self.arrived} other clients had replied {self.grace:g} s before"
            self.until, self.why = closing, (cause, "not awaited")

    def missing(self) -> list[int]:
        """Return the clients that have not replied, if it is time to log them; else []."""
        if time.monotonic() - self.began < self.patience:
            return []
        self.patience *= 2
        return sorted(msg.pid for msg, _ in self.asked.values())


class FlowerTransport:
    """Sends a step's messages through Flower's Grid, and looks for the replies.

    Flower's own Server would wait in a thread per client and look every 3 s in a deployment. It
    neither gives up nor continues when enough clients have replied.

    Args:
        members: the connected nodes, and the Grid that reaches them.
        nodes: which node hosts which client.
    """

    store = None  # clients keep their states at their sites

    def __init__(self, members: GridMembers, nodes: Nodes) -> None:
        self._members = members
        self._grid, self._near = members.grid, near(members.grid)
        self._nodes = nodes
        self._limits = nodes.limits
        self._started: set[int] = set()  # nodes that were sent a message of this run

    def exchange(self, plan: list[Broadcast], clock: Clock) -> Iterator[Reply]:
        with clock("broadcast"):
            exchange = self._send(plan)
        looks = count()
        for msg in plan:
            while msg.pid not in exchange.held and time.monotonic() <= exchange.until:
                with clock("upload"):
                    found = self._look(exchange)
                if not found:
                    if not self._near and (missing := exchange.missing()):
                        log.info(
                            "waiting for the replies of clients %s, on %s, for %.0f s",
                            *(
                                missing,
                                self._nodes.names(missing),
                                time.monotonic() - exchange.began,
                            ),
                        )
                    with clock("clients"):
                        time.sleep(pause_of(self._grid, len(plan), next(looks)))
                else:
                    looks = count()
            yield exchange.held.pop(msg.pid, Failure(msg.pid, msg.phase, msg.step, *exchange.why))

    def _send(self, plan: list[Broadcast]) -> GridExchange:
        """Send the messages to the nodes that have joined."""
        packer, pack = wire.MessagePacker(self._nodes.agreed), packing.RecordPacker()
        hosts = self._nodes.hosts([msg.pid for msg in plan], self._members)
        sent = [(msg, int(node)) for msg in plan if (node := hosts[msg.pid])]
        records = self._members.records
        messages = [message_of(msg, packer, pack, node, records) for msg, node in sent]
        if not (self._started or self._near) and self._limits.deadline is None:
            log.info(
                "replies.deadline=null: a step waits up to twelve hours for a client that does not"
                " reply"
            )
        if not self._started and (app := run_of(self._grid, "fab_hash")):
            log.info("the app of this run has the SHA-256 %s", app)
        nodes = [node for _, node in sent]
        start = not (self._near or self._started.issuperset(nodes))
        awaited, why = _awaited(self._limits, nodes, start)
        self._started.update(nodes)
        if awaited < inf:  # messages expire, so a node that was cut off does not answer old ones
            for message in messages:
                message.metadata.ttl = awaited + CLOCKS_SECONDS
        ids = list(self._grid.push_messages(messages))
        exchange = GridExchange(
            {id_: target for id_, target in zip(ids, sent, strict=True) if id_},
            time.monotonic() + awaited,
            (f"no reply within {awaited:g} s ({why})", "late"),
            self._limits.enough_of(len(plan)),
            self._limits.grace,
        )
        for msg in plan:
            if hosts[msg.pid] is None:
                cause = "its node is not connected"
                exchange.held[msg.pid] = Failure(msg.pid, msg.phase, msg.step, cause, "no reply")
        for id_, (msg, _) in zip(ids, sent, strict=True):
            if not id_:
                exchange.hold(Failure(msg.pid, msg.phase, msg.step, "Flower refused the message"))
        return exchange

    def _look(self, exchange: GridExchange) -> bool:
        """Take the replies that have arrived, and return whether there were any."""
        before = len(exchange.asked)
        for name, reply in pulled(self._grid, list(exchange.asked)):
            # Flower delivers one reply to each message, from the node that received the message.
            if asked := exchange.asked.pop(name, None):
                exchange.hold(read_message(*asked, reply, self._limits.max_bytes))
        return len(exchange.asked) < before


def read_message(msg: Broadcast, node: int, reply: Message | Rejected, more_bytes: int) -> Reply:
    """Return the reply to `msg`, read from Flower's message.

    Args:
        msg: the message that was sent.
        node: the node that received it.
        reply: Flower's message that has arrived, or why it could not be decoded.
        more_bytes: the bytes that the reply may have in addition to twice the bytes of `msg`.
    """
    if isinstance(reply, Rejected):
        return wire.refusal(msg, reply)
    if reply.has_error():
        cause = f"node {node}: {clean(reply.error.reason)}"
        reason = "failed" if reply.error.code == RAISED else "no reply"
        return Failure(msg.pid, msg.phase, msg.step, cause, reason)
    expected = sum(payload(msg.slot, msg.weights, msg.extras).values())
    try:
        arrays, carried = packing.opened(reply.content)
    except Rejected as error:
        return wire.refusal(msg, error)
    return wire.read_arrays(msg, arrays, carried, 2 * expected + more_bytes)


def message_of(
    msg: Broadcast,
    packer: wire.MessagePacker,
    pack: packing.RecordPacker,
    node: int,
    records: Mapping[str, ConfigRecord],
) -> Message:
    """Return the message in Flower's form for the node, with further records."""
    content = pack(*packer(msg))
    content.config_records.update(records)
    # KEEP goes to the train function: the evaluate function may be the app owner's own.
    evaluates = msg.phase == EVALUATE and KEEP not in msg.extras
    kind = MessageType.EVALUATE if evaluates else MessageType.TRAIN
    return Message(content, node, kind, group_id=str(msg.round))


def _awaited(limits: ReplyLimits, nodes: list[int], start: bool) -> tuple[float, str]:
    """Return how long the server waits for replies, and why.

    A node serves its clients one after another, so the busiest node decides.

    Args:
        limits: the run's limits.
        nodes: for each message, its node.
        start: whether one of the nodes gets its first message of the run.
    """
    if limits.deadline is None:
        return inf, ""
    most = max(Counter(nodes).values(), default=0)
    times = f" for each of its {most} clients" if most > 1 else ""
    why = f"replies.deadline={limits.deadline:g}{times}, and replies.grace={limits.grace:g}"
    seconds = limits.deadline * most + limits.grace
    if start:
        seconds, why = seconds + START_SECONDS, f"{why}, and {START_SECONDS:g} s to start"
    return seconds, why
