"""Sites with data of their own (dataset=local): the client at a site, and how sites join a run.

Before the first round each site sends its name, how many samples it has, and its part of the
normalisation statistics. It also confirms that its data are as declared. The server needs all
this to build the strategy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.client import NumPyClient

from fedhet.core.check import boolean
from fedhet.core.client.client import FedClient
from fedhet.core.client.state import Store
from fedhet.core.errors import ConfigError, DataError, MachineError, log
from fedhet.core.groups import ReplyLimits
from fedhet.core.limits import UNLIMITED, Limits, least_count
from fedhet.core.noise import allowed_here
from fedhet.core.task import Samples
from fedhet.data.files import confined
from fedhet.data.frames import CsvFormat
from fedhet.data.local.declaration import Declaration, Sites
from fedhet.data.local.description import Agreement, SiteDescription, read_statistics
from fedhet.data.local.reading import SiteFiles
from fedhet.flower import wire
from fedhet.flower.nodes import Members, Nodes
from fedhet.runs.config import Config
from fedhet.runs.job import Job
from fedhet.runs.local_data import LocalData, declaration, is_local, own_parts

DESCRIPTION_LIMIT = 16 * 2**20  # characters; 10,000 columns need a megabyte
EXAMPLE = """--node-config 'site="a" data="/path/of/its/data"'"""
_PATHS = ("data", "val", "test", "tokenizer")
_KEYS = ("site", *_PATHS, "read", "share-counts")


@dataclass(frozen=True)
class OwnData:
    """The data of a SuperNode, as its operator has configured them; no run can change this.

    Attributes:
        site: the site's name.
        files: the files with its data.
        shares: whether the site sends how many samples of each class it has.
        limits: the site's limits on what leaves it, and on what a run may build there.
    """

    site: str
    files: SiteFiles
    shares: bool = False
    limits: Limits = UNLIMITED

    @classmethod
    def of(cls, node_config: Mapping[str, Any]) -> OwnData | None:
        """Read the node config; return None for a node without data of its own.

        Raises:
            ConfigError: the config is incomplete, a path is not absolute, or a value is not
                allowed.
        """
        given = {key: node_config[key] for key in _KEYS if key in node_config}
        if not given:
            return None
        for key in ("site", "data"):
            if not isinstance(given.get(key), str):
                raise ConfigError(
                    f"this SuperNode's node config has {', '.join(given)}, but {key!r} is missing"
                    f" or not a text; start it with {EXAMPLE}"
                )
        paths = {key: Path(str(given[key])) for key in _PATHS if key in given}
        for key, path in paths.items():
            if not path.is_absolute():
                raise MachineError(f"node config: {key}={str(path)!r} must be an absolute path")
        shares = boolean("node config: share-counts", given.get("share-counts", False))
        form = CsvFormat.of_query(str(given.get("read", "")))
        return cls(given["site"], SiteFiles(**paths, form=form), shares, Limits.of(node_config))


class SiteClient(NumPyClient):
    """The client at a site. It describes the site's data to the server, and answers all messages.

    Every message includes the normalisation agreed before the first round.

    Args:
        settings: the run's configuration.
        own: the site's data.
        store: the store of the client's state, or a function from the run to the store.

    Attributes:
        pid: the site's number as a client.

    Raises:
        ConfigError: the run does not use the sites' own data, does not declare this site, or has
            less privacy than this machine demands.
        DataError: the site's data are not as declared, or too few to send any statistic.
    """

    def __init__(
        self, settings: Config, own: OwnData, store: Store | Callable[[str], Store]
    ) -> None:
        cfg = settings.cfg
        if not is_local(cfg):
            raise ConfigError(
                f"dataset={settings.choices['dataset']} divides a data set that all machines hold"
                f" into shares, but this SuperNode is the site {own.site!r} with data of its own;"
                " it takes part only in runs with dataset=local"
            )
        noise = allowed_here(settings.run.noise)  # refuses less than this machine demands
        self._declared, scheme = declared_elsewhere(settings)
        if noise and self._declared.auto:
            raise ConfigError(
                f"privacy.noise={noise.multiplier:g}: a site's statistics of its data are sent"
                f" without noise; give {' and '.join(self._declared.auto)} as numbers instead of"
                " 'auto'"
            )
        if noise and own.shares:
            raise ConfigError(
                f"privacy.noise={noise.multiplier:g}: a site's statistics of its data are sent"
                f" without noise; start the SuperNode of site {own.site!r} without"
                " share-counts=true"
            )
        self.pid = self._declared.number_of(own.site)
        self._hosted = {"partition-id": self.pid, "num-partitions": len(self._declared.sites)}
        self._own = own
        self._settings = settings
        self._store = store
        self._parts: dict[str, Samples] = own_parts(
            self._declared, scheme, cfg.seed, own.site, own.files
        )
        self._least = least_count(settings.run.min_count, own.limits)
        if self._declared.auto and len(self._parts["train"]) < self._least:
            raise DataError(
                f"site {own.site!r} has fewer than min_count={self._least} training samples, so it"
                f" may not send their mean and spread: give {' and '.join(self._declared.auto)} as"
                " numbers instead of 'auto'; then no site sends them"
            )

    @property
    def description(self) -> SiteDescription:
        """The description of the site's data that the server gets."""
        own = self._own
        min_count = self._least if own.shares else None
        return SiteDescription.of(
            self._declared, own.site, self._parts, min_count=min_count, least=self._least
        )

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        return {**self._hosted, "description": json.dumps(asdict(self.description))}

    def _client(self, carried: Mapping[str, Any]) -> FedClient:
        statistics = read_statistics(self._declared, wire.read_header(carried).get(wire.AGREED))
        data = LocalData.at_site(self._settings.cfg, self.pid, self._parts, statistics)
        job = Job(self._settings, engine="flwr", local=data, limits=self._own.limits)
        with confined():  # the run may name a file with the model's weights
            client = job.client(self._store, self._hosted)
        client.site_name = self._own.site
        return client

    def fit(
        self, parameters: list[np.ndarray], config: dict[str, Any]
    ) -> tuple[list[np.ndarray], int, dict[str, Any]]:
        return wire.Adapter(self._client(config)).fit(parameters, config)


def declared_elsewhere(settings: Config) -> tuple[Declaration, Sites]:
    """Return the declaration and the partition of a run that comes from another machine.

    Raises:
        ConfigError: the declaration names paths of sites, or is wrong.
    """
    declared, scheme = declaration(settings.cfg)
    if declared.files is not None:
        raise ConfigError(
            f"dataset.files={dict(declared.files)} is only for simulations: a deployed run names no"
            f" paths of sites, and each SuperNode is started with its own paths ({EXAMPLE})"
        )
    return declared, scheme


# ---- at the server
class SiteNodes(Nodes):
    """The nodes of a run by site; a site's number takes the place of the partition-id.

    Args:
        limits: how long to wait for nodes, and how many are enough.
        declared: the declaration that all sites share.

    Attributes:
        agreed_on: the joint description of the sites' data; set once the sites have joined.
    """

    agreed_on: Agreement

    def __init__(self, limits: ReplyLimits, declared: Declaration) -> None:
        super().__init__(limits)
        self._declared = declared
        self._total = len(declared.sites)
        # client -> the only node that may be its site in this run, and the node's description
        self._bound: dict[int, tuple[str, SiteDescription]] = {}

    def join(self, members: Members) -> None:
        """Wait for the sites, and combine the descriptions of their data.

        Raises:
            RunFailed: a node is not a declared site, its data do not fit, or too few have joined.
            Rejected: the descriptions contradict each other.
        """
        self._gather(members)
        descriptions = [self._bound.get(pid, ("", None))[1] for pid in range(self._total)]
        agreed = Agreement.of(self._declared, descriptions)
        for site, sizes in zip(self._declared.sites, agreed.sizes, strict=True):
            log.info("site %s: %d training, %d validation, %d test samples", site, *sizes)
        self._warn(agreed)
        self.agreed_on, self.agreed = agreed, agreed.statistics

    def _warn(self, agreed: Agreement) -> None:
        """Warn if one site outweighs all others together: the server cannot check its claim."""
        trained = [train for train, *_ in agreed.sizes]
        most, others = max(trained), sum(trained) - max(trained)
        if len(trained) > 2 and most > others:
            log.warning(
                "site %s claims %d training samples, and all other sites together %d: this site"
                " outweighs them in every mean; dataset.max_samples limits what a site may claim",
                *(self._declared.sites[trained.index(most)], most, others),
            )

    def _enter(self, cid: str, answer: dict[str, Any]) -> None:
        """Note which site the node is. Later, only this node with the same data can be the site.

        Raises:
            ValueError: the node is no declared site, another node is this site, or the site's data
                have changed.
        """
        description = self._description(answer)
        site = description.site
        pid = list(self._declared.sites).index(site)
        expected = str((self._declared.nodes or {}).get(site, cid))
        node, before = self._bound.get(pid, (expected, description))
        if cid != node:
            raise ValueError(f"it claims to be site {site!r}, but that site is node {node}")
        if before != description:
            raise ValueError(f"the data of site {site!r} have changed since the run began")
        self._by_partition[pid], self._bound[pid] = cid, (cid, description)

    def _description(self, properties: dict[str, Any]) -> SiteDescription:
        text = properties.get("description")
        if not isinstance(text, str) or len(text) > DESCRIPTION_LIMIT:
            raise ValueError(
                "it does not say which site it is: it sent no description of at most"
                f" {DESCRIPTION_LIMIT} characters"
            )
        try:
            return SiteDescription.read(self._declared, json.loads(text))
        except RecursionError as error:
            raise ValueError("its description is unreadable") from error

    def names(self, pids: Iterable[int]) -> str:
        return f"the sites {[self._declared.sites[pid] for pid in sorted(pids)]}"
