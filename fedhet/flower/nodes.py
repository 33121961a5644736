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
MOST_NODES = 1_000_000  # if a node claimed more nodes, they would fill the server's memory
ASK_SECONDS = 60.0  # the shortest time that the server waits for a node's properties
OWN_LOOP = "own-loop"  # the property of a node that trains by its owner's loop
PLACE = ("partition-id", "num-partitions")  # in a node's config and in its properties
Answer = dict[str, Any] | str  # a node's properties, or the reason why there are none


def place_of(node_config: Mapping[str, Any], otherwise: str = "") -> dict[str, int]:
    """Return a node's number, and the number of nodes, by the names in PLACE.

    Args:
        node_config: Flower's configuration of the node.
        otherwise: the alternative way to start the node, for the error message.

    Raises:
        ConfigError: the node was not started with these two numbers.
    """
    given = [str(node_config.get(name)) for name in PLACE]
    whole = all(re.fullmatch("[0-9]{1,9}", text) for text in given)
    if not whole or not int(given[0]) < int(given[1]):
        missing = [f"without {name!r}" for name in PLACE if name not in node_config]
        pairs = " and ".join(f"{name}={node_config.get(name)!r}" for name in PLACE)
        raise ConfigError(
            f"this SuperNode was started {missing[0] if missing else f'with {pairs}'}; start it"
            " with --node-config 'partition-id=0 num-partitions=3': its own number, counted from 0,"
            f" and the number of nodes{otherwise}"
        )
    return dict(zip(PLACE, map(int, given), strict=True))


class Members(Protocol):
    """The connected nodes, by their ids in Flower: GridMembers or ManagerMembers."""

    def ids(self) -> set[str]:
        """The nodes that are connected now."""

    def ask(self, ids: Collection[str], seconds: float) -> Iterable[tuple[str, Answer]]:
        """Yield (node, answer) for each of these nodes that answers within the seconds."""


class Nodes:
    """The nodes of a run by partition-id.

    Flower's node ids are random, so the server asks each node for its partition-id once.

    Attributes:
        limits: how long to wait for nodes, and how many are enough.
        clients: the clients, if each has a node of its own that reports its number of samples;
            otherwise None.
        data: the digest of the data; every node must have the same. None: it is not compared.
        own_loop: whether a node trains by its owner's loop.
        agreed: the data statistics agreed with the nodes before round 1; every message includes
            them. None: there are none.
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
        """Wait for the nodes, unless the run's settings say all that the server needs.

        Raises:
            RunFailed: too few nodes have joined within `limits.join` seconds.
        """
        if self.data is None:
            self.hosts((), members)
        if self.clients is not None:
            self.clients.begin()

    def hosts(self, pids: Iterable[int], members: Members) -> dict[int, str | None]:
        """Return a dict: client -> the node that hosts it, or None if this node is not connected.

        Raises:
            RunFailed: too few nodes have joined within `limits.join` seconds.
        """
        known = self._by_partition
        if len(known) < max(1, self._total) or not members.ids() >= set(known.values()):
            self._gather(members)
        return {pid: known.get(pid % self._total) for pid in pids}

    def _gather(self, members: Members) -> None:
        """Ask new nodes for their properties. The first time, wait until all have joined."""
        deadline = time.monotonic() + (0.0 if self._begun else self.limits.join)
        last_status = ""
        while True:
            self._ask_new(members)
            missing = sorted(set(range(self._total)) - set(self._by_partition))
            complete = self._total and not missing
            if complete or time.monotonic() > deadline:
                if not (complete or self._begun):
                    self._begin_without(missing)
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

    def _begin_without(self, missing: list[int]) -> None:
        """Begin without the missing nodes, if enough others have joined.

        Raises:
            RunFailed: too few nodes have joined.
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
        """Return the names of the nodes that host these clients, for messages."""
        return f"nodes with partition-id {sorted({pid % self._total for pid in pids})}"

    def _ask_new(self, members: Members) -> None:
        """Enter the nodes that are new, and forget the nodes that have left.

        Raises:
            RunFailed: before the run has begun, a node gives no valid answer, or two nodes claim
                the same partition-id.
        """
        present = members.ids()
        for partition, cid in list(self._by_partition.items()):
            if cid not in present:
                del self._by_partition[partition]
                self._asked.discard(cid)  # a node that comes back keeps its id
        new = sorted(present - self._asked)
        seconds = max(ASK_SECONDS, self.limits.join)
        answers = dict(members.ask(new, seconds) if new else ())
        for cid in new:
            self._asked.add(cid)
            try:
                answer = answers.get(cid, f"no answer within {seconds:g} s")
                if isinstance(answer, str):
                    raise ValueError(f"it does not report its properties: {answer}")
                self._enter(cid, answer)
            except ValueError as error:
                if cid not in members.ids():  # the node has left meanwhile, and may come back
                    self._asked.discard(cid)
                    continue
                problem = f"node {cid}: {clean(str(error))}"
                if not self._begun:
                    raise RunFailed(problem) from error
                log.warning("%s; the run continues without this node", problem)

    def _enter(self, cid: str, answer: dict[str, Any]) -> None:
        """Note the node's partition-id.

        Raises:
            ValueError: the answer has no partition-id, or contradicts the other nodes.
        """
        partition, total = (answer.get(name) for name in PLACE)
        if type(partition) is not int or type(total) is not int or not 0 <= partition < total:
            raise ValueError(
                f"it has partition-id={partition!r} and num-partitions={total!r}; expected: whole"
                " numbers, 0 <= partition-id < num-partitions"
            )
        if total > MOST_NODES:
            raise ValueError(f"it has num-partitions={total}; at most {MOST_NODES} are served")
        if self._total not in (0, total):
            raise ValueError(
                f"it has num-partitions={total}, but other nodes have {self._total}; all nodes must"
                " have the same number"
            )
        found = answer.get("data")
        if self.data not in (None, found):
            raise ValueError(
                "its samples, or their split over the clients, differ from the server's (digest"
                f" {str(found)[:16]!r}, here {self.data!r}): every machine must hold the whole data"
                " set; for sites with data of their own, use dataset=local"
            )
        if partition in self._by_partition:
            raise ValueError(
                f"two nodes have partition-id={partition}; give each of 0..{total - 1} to exactly"
                " one node"
            )
        if self.clients is not None:
            if total != len(self.clients):
                raise ValueError(
                    f"it has num-partitions={total}, but the server's Task has {len(self.clients)}"
                    " clients; each client needs a node of its own"
                )
            self.clients.learn(partition, answer)
        self._by_partition[partition] = cid
        self._total = total
        self.own_loop |= answer.get(OWN_LOOP) is True


def nodes_of(method: FedStrategy) -> Nodes:
    """Return the nodes of a method in a user's own app, with one client on each node."""
    clients = method.workspace.task.clients
    held = clients if isinstance(clients, HeldClients) else None
    return Nodes(method.setup.replies, clients=held)
