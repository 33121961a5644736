"""How the sites of a run with dataset=local join it, before its first round.

Each site says who it is, that its data are as declared, and how many samples it has; it contributes
to the normalisation once. Only then does the server know what it needs to build the strategy.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import Any

from flwr.common import Code, GetPropertiesRes
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy

from fedhet.core.groups import ReplyLimits
from fedhet.data.local.declaration import Declaration
from fedhet.data.local.description import Agreement, SiteDescription
from fedhet.flower.nodes import Nodes

log = logging.getLogger("fedhet")
DESCRIPTION_LIMIT = 16 * 2**20  # characters; 10,000 columns need a megabyte


class SiteNodes(Nodes):
    """The nodes of a run by site: the number of a site takes the place of the partition-id.

    Args:
        limits: how long to wait for nodes, and how many are enough.
        declared: what the sites have in common.
    """

    def __init__(self, limits: ReplyLimits, declared: Declaration) -> None:
        super().__init__(limits)
        self._declared = declared
        self._total = len(declared.sites)
        self._descriptions: dict[int, SiteDescription] = {}
        self._bound: dict[int, str] = {}  # client -> the node that alone is its site in this run

    def agree(self, manager: ClientManager) -> Agreement:
        """Wait for the sites, and join what they tell of their data.

        Raises:
            RunFailed: a node is no declared site, its data do not fit, or too few have joined.
        """
        self._gather(manager)
        sites = range(self._total)
        agreed = Agreement.of(self._declared, [self._descriptions.get(pid) for pid in sites])
        for site, sizes in zip(self._declared.sites, agreed.sizes, strict=True):
            log.info("site %s: %d training, %d validation, %d test samples", site, *sizes)
        self._warn(agreed)
        self.agreed = agreed.statistics
        return agreed

    def _warn(self, agreed: Agreement) -> None:
        """Say which site outweighs all others together: nobody can count its samples."""
        trained = [train for train, *_ in agreed.sizes]
        most, others = max(trained), sum(trained) - max(trained)
        if len(trained) > 2 and most > others:
            log.warning(
                "site %s claims %d training samples, and all others together %d: it outweighs them"
                " in every mean; dataset.max_samples limits what a site may claim",
                *(self._declared.sites[trained.index(most)], most, others),
            )

    def _enter(self, proxy: ClientProxy, answer: GetPropertiesRes | str) -> None:
        if isinstance(answer, str) or answer.status.code != Code.OK:
            reason = answer if isinstance(answer, str) else answer.status.message
            raise ValueError(f"it does not say which site it is: {reason}")
        description = self._description(dict(answer.properties))
        pid = list(self._declared.sites).index(description.site)
        self._check_bound(pid, description, proxy)
        self._by_partition[pid] = proxy
        self._descriptions[pid] = description
        self._bound[pid] = proxy.cid

    def _description(self, properties: dict[str, Any]) -> SiteDescription:
        if isinstance(problem := properties.get("problem"), str):
            raise ValueError(problem)
        text = properties.get("description")
        if not isinstance(text, str) or len(text) > DESCRIPTION_LIMIT:
            raise ValueError("it does not say which site it is")
        try:
            return SiteDescription.read(self._declared, json.loads(text))
        except RecursionError as error:
            raise ValueError("its description is unreadable") from error

    def names(self, pids: Iterable[int]) -> str:
        return f"the sites {[self._declared.sites[pid] for pid in sorted(pids)]}"

    def _check_bound(self, pid: int, description: SiteDescription, proxy: ClientProxy) -> None:
        """Refuse another node for a site, or other data of it.

        Raises:
            ValueError: saying which.
        """
        site, node = description.site, proxy.cid
        expected = (self._declared.nodes or {}).get(site)
        if expected is not None and str(expected) != node:
            raise ValueError(f"it claims to be site {site!r}, which is node {expected}")
        if self._bound.get(pid, node) != node:
            raise ValueError(f"it claims to be site {site!r}, which is node {self._bound[pid]}")
        if self._descriptions.get(pid, description) != description:
            raise ValueError(f"site {site!r} has other data than when the run began")
