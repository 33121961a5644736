"""Flower's transport of a step, by Flower's public Grid.

Who is connected, who the nodes are, and what has arrived. A message has two records besides that of
packing.py: the run's settings and, in an app of one's own, what the owner gives to their own
training loop.
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

CLOCKS_SECONDS = 5  # by which Flower lets the clocks of its machines differ
# Beyond the deadline, for a node's first message in a run: it imports, and reads the site's data.
START_SECONDS = 120.0
PATIENCE = 180.0  # seconds of a step after which the log says who is missing; then twice as many

SETTINGS = "fedhet.settings"  # the record with the run's settings, under its own name
CONFIG = "config"  # Flower's name of the record that the owner gives to `start` as train_config
ASKS = "fedhet.asks"  # the record of the question who a node is, and of the answer
RAISED = 2  # Flower's code of an error that an app at a node has raised
AGAIN_SECONDS = 30.0  # after which a node that has not answered is asked again; then twice as long
# Seconds between two looks for replies: often in a simulation; over HTTP less and less often.
NEAR_SECONDS = 0.02
LOOKS_PER_SECOND = 5000  # of a simulation, whose looks cost the more, the more clients there are
FAR_SECONDS = (0.1, 1.0)


def settings_records(
    settings: Config, config: Mapping[str, object] | None = None
) -> dict[str, ConfigRecord]:
    """The records that each message of a run has besides Flower's.

    Args:
        settings: the run's.
        config: what the owner gives to their own training loop.
    """
    told = {SETTINGS: ConfigRecord({SETTINGS: sent.written(settings)})}
    return {**told, CONFIG: ConfigRecord(dict(config))} if config else told  # type: ignore[arg-type]


@dataclass(frozen=True)
class GridMembers:
    """The nodes that are connected, as a Grid tells them.

    Attributes:
        grid: the Grid.
        records: are part of each message to a node.
    """

    grid: Grid
    records: Mapping[str, ConfigRecord] = field(default_factory=dict)

    def ids(self) -> set[str]:
        """The nodes that are connected now."""
        return set(map(str, self.grid.get_node_ids()))

    def ask(self, ids: Collection[str], seconds: float) -> Iterator[tuple[str, Answer]]:
        """Ask nodes who they are, by the function that every app of a method has: `train`.

        A node that is silent is asked again, because a SuperNode does not send a reply again that
        the SuperLink could not take. Its first answer counts.

        Args:
            ids: the nodes.
            seconds: how long they have.
        """
        silent, asked = dict.fromkeys(ids), dict[str, str]()
        again = began = time.monotonic()
        pause, looks = AGAIN_SECONDS, count()
        while silent and (left := began + seconds - time.monotonic()) > 0:
            if time.monotonic() >= again:
                if again > began:
                    log.info("asking %d of %d nodes again who they are", len(silent), len(ids))
                content = RecordDict({ASKS: ConfigRecord(), **self.records})
                kind = MessageType.TRAIN
                names = self.grid.push_messages(
                    [Message(content, int(node), kind, ttl=left) for node in silent]
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
    """What a node tells of itself, or why it does not."""
    if isinstance(reply, Rejected):
        return str(reply)
    if reply.has_error():
        return str(reply.error.reason)
    told = reply.content.config_records.get(ASKS)
    return "its app does not answer the question" if told is None else dict(told)


def pulled(grid: Grid, names: list[str]) -> Iterator[tuple[str, Message | Rejected]]:
    """The replies that have arrived, each with the name of the message that it answers.

    From other machines they are taken one at a time: what cannot be decoded takes the others of
    its pull with it.
    """
    for some in [names] if near(grid) else [[name] for name in names]:
        try:
            found = list(grid.pull_messages(some))
        except packing.UNDECODABLE as error:
            if len(some) > 1:
                raise
            problem = f"Flower cannot decode it: {type(error).__name__}: {error}"
            yield some[0], Rejected("unreadable", problem)
            continue
        for reply in found:
            yield reply.metadata.reply_to_message_id, reply


def near(grid: Grid) -> bool:
    """Whether the replies are in this process already, as in a simulation."""
    return run_of(grid, "primary_task_type") == "flwr-simulation"


@lru_cache(maxsize=4)  # a Grid asks a database each time
def run_of(grid: Grid, name: str) -> str:
    """What Flower's Grid says of the run, or "" if it does not."""
    return str(getattr(getattr(grid, "run", None), name, ""))


def pause_of(grid: Grid, clients: int, looks: int) -> float:
    """Seconds until the next look, which has been in vain so many times."""
    if near(grid):
        return max(NEAR_SECONDS, clients / LOOKS_PER_SECOND)
    low, high = FAR_SECONDS
    return float(min(high, low * 1.1 ** min(looks, 100)))


# ---- a step
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
        self.arrived += isinstance(reply, Upload)
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


class FlowerTransport:
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
        packer, pack = wire.MessagePacker(self._nodes.agreed), packing.RecordPacker()
        hosts = self._nodes.hosts([msg.pid for msg in plan], self._members)
        sent = [(msg, int(node)) for msg in plan if (node := hosts[msg.pid])]
        records = self._members.records
        messages = [message_of(msg, packer, pack, node, records) for msg, node in sent]
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
        before = len(exchange.asked)
        for name, reply in pulled(self._grid, list(exchange.asked)):
            # Flower passes on one reply to each message, from the node that it was sent to.
            if asked := exchange.asked.pop(name, None):
                exchange.hold(read_message(*asked, reply, self._limits.max_bytes))
        return len(exchange.asked) < before


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
    """The message as Flower carries it to the node, with further records."""
    content = pack(*packer(msg))
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
    most = max(Counter(nodes).values(), default=0)
    times = f" for each of its {most} clients" if most > 1 else ""
    why = f"replies.deadline={limits.deadline:g}{times}, and replies.grace={limits.grace:g}"
    seconds = limits.deadline * most + limits.grace
    if start:
        seconds, why = seconds + START_SECONDS, f"{why}, and {START_SECONDS:g} s to start"
    return seconds, why
