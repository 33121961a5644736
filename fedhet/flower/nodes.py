"""Which Flower node hosts which client: client p lives on the node with partition-id p mod
num-partitions."""

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


class Roster:
    """Flower's node ids are random, so each node is asked once for its partition-id."""

    def __init__(self) -> None:
        self._nodes: dict[int, ClientProxy] = {}  # partition-id -> proxy
        self._asked: set[str] = set()
        self._total = 0
        self.cancelled = False  # set where no node can come any more

    def proxy(self, pid: int, manager: ClientManager) -> ClientProxy:
        """The node that hosts client `pid`; RunFailed where the nodes do not cover 0 ..
        num-partitions - 1 in JOIN_SECONDS."""
        if not self._total or len(self._nodes) < self._total:
            self._gather(manager)
        return self._nodes[pid % self._total]

    def _gather(self, manager: ClientManager) -> None:
        deadline, said = time.monotonic() + JOIN_SECONDS, ""
        while True:
            manager.num_available()  # asks Flower for new nodes; a bare look would not
            new = {
                cid: proxy for cid, proxy in sorted(manager.all().items()) if cid not in self._asked
            }
            # one wave of messages, however many nodes
            with ThreadPoolExecutor(max_workers=len(new) or 1) as pool:
                for (cid, proxy), res in zip(
                    new.items(), pool.map(_ask, new.values()), strict=True
                ):
                    self._enter(cid, proxy, res)
            missing = sorted(set(range(self._total)) - set(self._nodes))
            if self._total and not missing:
                return
            if self.cancelled:
                raise RunFailed("the backend that hosts the nodes has ended")
            if time.monotonic() > deadline:
                raise RunFailed(
                    f"waited {JOIN_SECONDS:.0f} s for nodes with partition-id"
                    f" {missing or '0, 1, ...'}; {len(self._nodes)} of"
                    f" {self._total or 'an unknown number'} are here"
                )
            here = (
                f"waiting for nodes; here are partition-ids {sorted(self._nodes)} of"
                f" {self._total or '?'}"
            )
            if here != said:
                log.info(said := here)
            time.sleep(POLL_SECONDS)

    def _enter(self, cid: str, proxy: ClientProxy, res: GetPropertiesRes) -> None:
        if res.status.code != Code.OK:
            raise RunFailed(f"node {cid} does not tell its partition-id: {res.status.message}")
        partition, total = (
            int(res.properties["partition-id"]),
            int(res.properties["num-partitions"]),
        )  # type: ignore[arg-type]
        self._asked.add(cid)
        if self._total not in (0, total):
            raise RunFailed(
                f"node {cid} says num-partitions={total}, others say {self._total}; all must say"
                " the same"
            )
        if partition in self._nodes:
            raise RunFailed(
                f"two nodes have partition-id={partition}; each of 0..{total - 1} must be given to"
                " one node"
            )
        self._nodes[partition], self._total = proxy, total

    def in_order(
        self, sent: dict[int, Broadcast], results: list[tuple[Any, Any]], failures: list[Any]
    ) -> Iterator[Reply]:
        """The replies in the order of `sent`. Flower's failures do not say whose they are: who is
        missing has failed."""
        by_pid: dict[int, Any] = {}
        for proxy, res in results:
            try:
                header = wire.read_header(dict(res.metrics))
                pid = header.get("failure", header)["pid"]
                if self._total and self._nodes.get(pid % self._total) is not proxy:
                    raise ValueError(
                        f"it is signed by client {pid}, which node {proxy.cid} does not host"
                    )
                by_pid.setdefault(pid, res)
            except (KeyError, TypeError, ValueError) as error:
                log.warning("a reply is left out: %s", error)
        causes = "; ".join(sorted({str(f) for f in failures})) or "Flower reported nothing"
        silent = f"no reply from clients {[pid for pid in sent if pid not in by_pid]}: {causes}"
        for pid, msg in sent.items():
            yield (
                wire.read_result(msg, by_pid[pid])
                if pid in by_pid
                else Failure(pid, msg.phase, msg.step, silent)
            )


def _ask(proxy: ClientProxy) -> GetPropertiesRes:
    try:
        return proxy.get_properties(GetPropertiesIns({}), timeout=None, group_id=0)
    except ValueError as error:  # how Flower tells that the node has failed or gone
        raise RunFailed(f"node {proxy.cid} does not tell its partition-id: {error}") from error
