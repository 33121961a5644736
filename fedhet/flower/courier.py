"""Flower's transport of a step."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from math import inf

from flwr.app import ConfigRecord, Message, MessageType

from fedhet.core.client.client import KEEP
from fedhet.core.errors import Rejected, clean
from fedhet.core.groups import ReplyLimits
from fedhet.core.messages import EVALUATE, Broadcast, Failure, Reply, payload
from fedhet.core.server.loop import Clock
from fedhet.flower import parcels, wire
from fedhet.flower.grid import RAISED, GridMembers, near, pause_of, pulled, run_of
from fedhet.flower.nodes import Nodes

log = logging.getLogger("fedhet")
CLOCKS_SECONDS = 5  # by which Flower lets the clocks of its machines differ
# Beyond the deadline, for a node's first message in a run: it imports, and reads the site's data.
START_SECONDS = 120.0
PATIENCE = 180.0  # seconds of a step after which the log says who is missing; then twice as many


@dataclass
class GridExchange:
    """The messages of one step that are under way.

    Attributes:
        asked: message id -> (the message, the node that it went to).
        until: when they are no longer awaited, on the monotonic clock.
        why: (cause, reason) of the failure of whoever has not replied by then.
        enough: after so many replies the others are awaited for `grace` seconds only.
        held: client -> its reply, whose turn has not come.
        began: when they were sent, on the monotonic clock.
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
        self.arrived += 1
        closing = time.monotonic() + self.grace
        if self.arrived == self.enough and closing < self.until:
            cause = f"{self.arrived} other clients had replied {self.grace:g} s before"
            self.until, self.why = closing, (cause, "not awaited")

    def missing(self) -> list[int]:
        """The clients that have not replied, when it is time to say so."""
        if time.monotonic() - self.began < self.patience:
            return []
        self.patience *= 2
        return sorted(msg.pid for msg, _ in self.asked.values())


class FlowerCourier:
    """Sends a step's messages through Flower's Grid, and looks for the replies.

    Flower's own Server waits in a thread per client, looks every 3 s in a deployment, and neither
    gives up nor goes on when enough clients have replied.

    Args:
        members: the nodes that are connected, and what reaches them.
        nodes: which node hosts which client.
    """

    store = None  # the clients keep their states at their sites

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
            late = Failure(msg.pid, msg.phase, msg.step, *exchange.why)
            yield exchange.held.pop(msg.pid, late)

    def _send(self, plan: list[Broadcast]) -> GridExchange:
        """Send the messages to the nodes that have joined."""
        packer, parcel = wire.MessagePacker(self._nodes.agreed), parcels.Parcels()
        hosts = self._nodes.hosts([msg.pid for msg in plan], self._members)
        sent = [(msg, int(node)) for msg in plan if (node := hosts[msg.pid])]
        records = self._members.records
        messages = [message_of(msg, packer, parcel, node, records) for msg, node in sent]
        if not (self._started or self._near) and self._limits.deadline is None:
            log.info(
                "replies.deadline=null: a step waits for a client that does not reply, twelve hours"
                " at most"
            )
        if not self._started and (app := run_of(self._grid, "fab_hash")):
            log.info("the app of this run has the SHA-256 %s", app)
        nodes = [node for _, node in sent]
        start = not (self._near or self._started.issuperset(nodes))
        awaited, why = _awaited(self._limits, nodes, start)
        self._started.update(nodes)
        if awaited < inf:  # else a node that was cut off works off all that it has missed
            for message in messages:
                message.metadata.ttl = awaited + CLOCKS_SECONDS
        ids = list(self._grid.push_messages(messages))
        asked = {id_: one for id_, one in zip(ids, sent, strict=True) if id_}
        exchange = GridExchange(
            asked,
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
        before = exchange.arrived
        for name, reply in pulled(self._grid, list(exchange.asked)):
            # Flower passes on one reply to each message, from the node that it was sent to.
            if asked := exchange.asked.pop(name, None):
                exchange.hold(read_message(*asked, reply, self._limits.max_bytes))
        return exchange.arrived > before


def read_message(msg: Broadcast, node: int, reply: Message | Rejected, more_bytes: int) -> Reply:
    """The reply to `msg`, from Flower's message.

    Args:
        msg: what was sent.
        node: to whom.
        reply: what has arrived, or why it could not be read.
        more_bytes: how many bytes it may have beyond twice those of `msg`.
    """
    if isinstance(reply, Rejected):
        return wire.refusal(msg, reply)
    if reply.has_error():
        cause = f"node {node}: {clean(reply.error.reason)}"
        reason = "failed" if reply.error.code == RAISED else "no reply"
        return Failure(msg.pid, msg.phase, msg.step, cause, reason)
    expected = sum(payload(msg.slot, msg.weights, msg.extras).values())
    try:
        arrays, carried = parcels.opened(reply.content)
    except Rejected as error:
        return wire.refusal(msg, error)
    return wire.read_arrays(msg, arrays, carried, 2 * expected + more_bytes)


def message_of(
    msg: Broadcast,
    packer: wire.MessagePacker,
    parcel: parcels.Parcels,
    node: int,
    records: Mapping[str, ConfigRecord],
) -> Message:
    """The message as Flower carries it to the node, with further records."""
    content = parcel(*packer(msg))
    content.config_records.update(records)
    # The final model is kept by the function for training: the other may be the owner's.
    evaluates = msg.phase == EVALUATE and KEEP not in msg.extras
    kind = MessageType.EVALUATE if evaluates else MessageType.TRAIN
    return Message(content, node, kind, group_id=str(msg.round))


def _awaited(limits: ReplyLimits, nodes: list[int], start: bool) -> tuple[float, str]:
    """How long replies are awaited, and why: a node serves its clients one after another.

    Args:
        limits: the run's.
        nodes: for each message, its node.
        start: whether it is the first message of one of them.
    """
    if limits.deadline is None:
        return inf, ""
    most = max((nodes.count(node) for node in set(nodes)), default=0)
    times = f" for each of its {most} clients" if most > 1 else ""
    why = f"replies.deadline={limits.deadline:g}{times}, and replies.grace={limits.grace:g}"
    seconds = limits.deadline * most + limits.grace
    if start:
        seconds, why = seconds + START_SECONDS, f"{why}, and {START_SECONDS:g} s to start"
    return seconds, why
