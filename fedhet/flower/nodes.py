"""Which Flower node hosts which client.

Client p lives on the node with partition-id p mod num-partitions.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

from fedhet.core.errors import ConfigError, RunFailed, clean, log
from fedhet.core.groups import ReplyLimits
from fedhet.core.server.strategy import FedStrategy
from fedhet.core.task import HeldClients

POLL_SECONDS = 1.0
MOST_NODES = 1_000_000  # a node that claims more would occupy the server's memory
ASK_SECONDS = 60.0  # how long a node has, at least, to say who it is
OWN_LOOP = "own-loop"  # the property of a node that trains by a loop of its owner's
PLACE = ("partition-id", "num-partitions")  # in a node's config and in its properties
Answer = dict[str, Any] | str  # what a node tells of itself, or why it does not


def place_of(node_config: Mapping[str, Any], otherwise: str = "") -> dict[str, int]:
    """Which number a node has, of how many.

    Args:
        node_config: Flower's configuration of the node.
        otherwise: what it may be started with instead, for the message.

    Raises:
        ConfigError: it was not started with these numbers.
    """
    given = [str(node_config.get(name)) for name in PLACE]
    whole = all(re.fullmatch("[0-9]{1,9}", one) for one in given)
    if not whole or not int(given[0]) < int(given[1]):
        missing = [f"without {name!r}" for name in PLACE if name not in node_config]
        pairs = " and ".join(f"{name}={node_config.get(name)!r}" for name in PLACE)
        raise ConfigError(
            f"this SuperNode was started {missing[0] if missing else f'with {pairs}'}; give it"
            " --node-config 'partition-id=0 num-partitions=3' with its own number, from 0, and how"
            f" many there are{otherwise}"
        )
    return dict(zip(PLACE, map(int, given), strict=True))


class Members(Protocol):
    """What knows the nodes by their ids in Flower: GridMembers, or ManagerMembers."""

    def ids(self) -> set[str]:
        """The nodes that are connected now."""

    def ask(self, ids: Collection[str], seconds: float) -> Iterable[tuple[str, Answer]]:
        """The nodes that answer within the seconds, with what they tell of themselves."""


class Nodes:
    """The nodes of a run by partition-id.

    Flower's node ids are random, so each node is asked for its partition-id once.

    Attributes:
        limits: how long to wait for nodes, and how many are enough.
        clients: those of whom each has a node, which tells how many samples it has; or None.
        data: a digest of the data that every node must have, too; None: it is not compared.
        own_loop: whether a node trains by a loop of its owner's.
        agreed: what every message repeats of what was agreed on with the nodes; None for nothing.
    """

    def __init__(
        self, limits: ReplyLimits, data: str | None = None, clients: HeldClients | None = None
    ) -> None:
        self.limits = limits
        self.clients = clients
        self._by_partition: dict[int, str] = {}
        self._asked: set[str] = set()
        self._total = 0
        self._begun = self.own_loop = False
        self.data = data
        self.agreed: dict[str, list[float]] | None = None

    def join(self, members: Members) -> None:
        """Wait for the nodes, unless the settings of the run say all that the server must know.

        Raises:
            RunFailed: too few have joined within the time that they have for it.
        """
        if self.data is None:
            self.hosts((), members)
        if self.clients is not None:
            self.clients.begin()

    def hosts(self, pids: Iterable[int], members: Members) -> dict[int, str | None]:
        """Client -> the node that hosts it, or None if the run goes on without it.

        Raises:
            RunFailed: too few nodes have joined within the time that they have for it.
        """
        known = self._by_partition
        if len(known) < max(1, self._total) or not members.ids() >= set(known.values()):
            self._gather(members)
        return {pid: known.get(pid % self._total) for pid in pids}

    def _gather(self, members: Members) -> None:
        """Ask new nodes who they are. The first time, wait until all have joined."""
        deadline = time.monotonic() + (0.0 if self._begun else self.limits.join)
        last_status = ""
        while True:
            self._ask_new(members)
            missing = sorted(set(range(self._total)) - set(self._by_partition))
            complete = self._total and not missing
            if complete or time.monotonic() > deadline:
                if not (complete or self._begun):
                    self._go_on_without(missing)
                self._begun = True
                return
            status = (
                f"waiting for nodes; {self.names(self._by_partition)} of {self._total or '?'} have"
                " joined"
            )
            if status != last_status:
                log.info(status)
                last_status = status
            time.sleep(min(POLL_SECONDS, self.limits.join))

    def _go_on_without(self, missing: list[int]) -> None:
        """Begin without the missing nodes, if enough others have joined.

        Raises:
            RunFailed: they have not.
        """
        joined = len(self._by_partition)
        if self.limits.min_nodes is None or joined < self.limits.min_nodes:
            needed = "all" if self.limits.min_nodes is None else self.limits.min_nodes
            awaited = self.names(missing) if missing else "nodes"
            raise RunFailed(
                f"waited {self.limits.join:g} s for {awaited}; {joined} of"
                f" {self._total or 'an unknown number'} have joined"
                f" (replies.join={self.limits.join:g}, replies.min_nodes: {needed})"
            )
        log.warning("the run begins without %s", self.names(missing))

    def names(self, pids: Iterable[int]) -> str:
        """The nodes that host these clients, for messages."""
        return f"nodes with partition-id {sorted({pid % self._total for pid in pids})}"

    def _ask_new(self, members: Members) -> None:
        """Enter the nodes that are new, and forget those that have left.

        Raises:
            RunFailed: before the run has begun, a node does not say who it is, or two are the same.
        """
        present = members.ids()
        for partition, cid in list(self._by_partition.items()):
            if cid not in present:
                del self._by_partition[partition]
                self._asked.discard(cid)  # one that comes back keeps its id
        new = sorted(present - self._asked)
        seconds = max(ASK_SECONDS, self.limits.join)
        answers = dict(members.ask(new, seconds) if new else ())
        for cid in new:
            self._asked.add(cid)
            try:
                answer = answers.get(cid, f"no answer within {seconds:g} s")
                if isinstance(answer, str):
                    raise ValueError(f"it does not say who it is: {answer}")
                self._enter(cid, answer)
            except ValueError as error:
                if cid not in members.ids():  # it has left meanwhile, and may come back
                    self._asked.discard(cid)
                    continue
                problem = f"node {cid}: {clean(str(error))}"
                if not self._begun:
                    raise RunFailed(problem) from error
                log.warning("%s; the run goes on without it", problem)

    def _enter(self, cid: str, answer: dict[str, Any]) -> None:
        """Note which partition-id the node has.

        Raises:
            ValueError: it does not say, or contradicts the other nodes.
        """
        partition, total = (answer.get(name) for name in PLACE)
        if type(partition) is not int or type(total) is not int or not 0 <= partition < total:
            raise ValueError(f"it has partition-id={partition!r} and num-partitions={total!r}")
        if total > MOST_NODES:
            raise ValueError(f"it has num-partitions={total}; at most {MOST_NODES} are served")
        if self._total not in (0, total):
            raise ValueError(
                f"it has num-partitions={total}, others have {self._total}; all must have the same"
            )
        found = answer.get("data")
        if self.data not in (None, found):
            raise ValueError(
                "its samples, or how they are shared out, are not those of the server (digest"
                f" {str(found)[:16]!r}, here {self.data!r}): every machine must hold the whole data"
                " set; dataset=local is for sites with data of their own"
            )
        if partition in self._by_partition:
            raise ValueError(
                f"two nodes have partition-id={partition}; each of 0..{total - 1} must be given to"
                " one node"
            )
        if self.clients is not None:
            if total != len(self.clients):
                raise ValueError(
                    f"it has num-partitions={total}, and the server's Task {len(self.clients)}"
                    " clients, which have a node each"
                )
            self.clients.learn(partition, answer)
        self._by_partition[partition] = cid
        self._total = total
        self.own_loop |= answer.get(OWN_LOOP) is True


def nodes_of(method: FedStrategy) -> Nodes:
    """The nodes of a method in an app of one's own, which have one client each."""
    clients = method.workspace.task.clients
    held = clients if isinstance(clients, HeldClients) else None
    return Nodes(method.setup.replies, clients=held)
