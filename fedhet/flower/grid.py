"""A run's nodes by Flower's public Grid: who is connected, who they are, and what has arrived.

A message has two records besides that of parcels.py: the run's settings and, in an app of one's
own, what the owner gives to their own training loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedhet.core.errors import Rejected
from fedhet.flower.nodes import Answer
from fedhet.flower.parcels import UNDECODABLE
from fedhet.runs.config import Config, sent

log = logging.getLogger("fedhet")
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
        except UNDECODABLE as error:
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
