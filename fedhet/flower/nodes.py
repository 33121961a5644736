"""Which Flower node hosts which client.

Client p lives on the node with partition-id p mod num-partitions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from flwr.common import Code, GetPropertiesIns, GetPropertiesRes
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy

from fedhet.errors import RunFailed
from fedhet.flower import wire
from fedhet.messages import Broadcast, Failure, Reply

log = logging.getLogger("fedhet")
JOIN_SECONDS = 600.0  # how long to wait for the nodes that num-partitions promises
POLL_SECONDS = 1.0


class Nodes:
    """The nodes of a run by partition-id.

    Flower's node ids are random, so each node is asked for its partition-id once.

    Attributes:
        ended: why no node will answer any more, set from outside; None while they can.
    """

    def __init__(self) -> None:
        self._by_partition: dict[int, ClientProxy] = {}
        self._asked: set[str] = set()
        self._total = 0
        self.ended: str | None = None

    def proxy(self, pid: int, manager: ClientManager) -> ClientProxy:
        """The node that hosts client `pid`.

        Raises:
            RunFailed: the nodes do not cover 0 .. num-partitions - 1 within JOIN_SECONDS.
        """
        if not self._total or len(self._by_partition) < self._total:
            self._gather(manager)
        return self._by_partition[pid % self._total]

    def _gather(self, manager: ClientManager) -> None:
        """Wait until a node has joined for every partition-id."""
        deadline = time.monotonic() + JOIN_SECONDS
        last_status = ""
        while True:
            manager.num_available()  # asks Flower for new nodes, which all() does not
            joined = sorted(manager.all().items())
            new = {cid: proxy for cid, proxy in joined if cid not in self._asked}
            # One wave of messages, however many nodes there are.
            with ThreadPoolExecutor(max_workers=len(new) or 1) as pool:
                answers = pool.map(_ask, new.values())
                for (cid, proxy), answer in zip(new.items(), answers, strict=True):
                    self._enter(cid, proxy, answer)
            missing = sorted(set(range(self._total)) - set(self._by_partition))
            if self._total and not missing:
                return
            if self.ended is not None:
                raise RunFailed(self.ended)
            if time.monotonic() > deadline:
                raise RunFailed(
                    f"waited {JOIN_SECONDS:.0f} s for nodes with partition-id"
                    f" {missing or '0, 1, ...'}; {len(self._by_partition)} of"
                    f" {self._total or 'an unknown number'} have joined"
                )
            status = (
                f"waiting for nodes; partition-ids {sorted(self._by_partition)} of"
                f" {self._total or '?'} have joined"
            )
            if status != last_status:
                log.info(status)
                last_status = status
            time.sleep(POLL_SECONDS)

    def _enter(self, cid: str, proxy: ClientProxy, answer: GetPropertiesRes) -> None:
        if answer.status.code != Code.OK:
            raise RunFailed(f"node {cid} does not report its partition-id: {answer.status.message}")
        partition = int(answer.properties["partition-id"])  # type: ignore[arg-type]
        total = int(answer.properties["num-partitions"])  # type: ignore[arg-type]
        self._asked.add(cid)
        if self._total not in (0, total):
            raise RunFailed(
                f"node {cid} has num-partitions={total}, others have {self._total}; all must have"
                " the same"
            )
        if partition in self._by_partition:
            raise RunFailed(
                f"two nodes have partition-id={partition}; each of 0..{total - 1} must be given to"
                " one node"
            )
        self._by_partition[partition] = proxy
        self._total = total

    def in_order(
        self, sent: dict[int, Broadcast], results: list[tuple[Any, Any]], failures: list[Any]
    ) -> Iterator[Reply]:
        """The replies in the order of `sent`, a message for each client.

        Flower's failures do not name their client: a client without a reply counts as failed.
        """
        by_pid: dict[int, Any] = {}
        for proxy, res in results:
            try:
                header = wire.read_header(dict(res.metrics))
                pid = header.get("failure", header)["pid"]
                if self._total and self._by_partition.get(pid % self._total) is not proxy:
                    raise ValueError(
                        f"it is signed by client {pid}, which node {proxy.cid} does not host"
                    )
                by_pid.setdefault(pid, res)
            except (KeyError, TypeError, ValueError) as error:
                log.warning("a reply is left out: %s", error)
        causes = "; ".join(sorted({str(f) for f in failures})) or "Flower reported nothing"
        silent = f"no reply from clients {[pid for pid in sent if pid not in by_pid]}: {causes}"
        for pid, msg in sent.items():
            if pid in by_pid:
                yield wire.read_result(msg, by_pid[pid])
            else:
                yield Failure(pid, msg.phase, msg.step, silent)


def _ask(proxy: ClientProxy) -> GetPropertiesRes:
    try:
        return proxy.get_properties(GetPropertiesIns({}), timeout=None, group_id=0)
    except ValueError as error:  # Flower's way to report that the node has failed or left
        raise RunFailed(f"node {proxy.cid} does not report its partition-id: {error}") from error
