"""Sites with data of their own (dataset=local): the client at a site, and how sites join a run.

Before the first round each site says who it is, that its data are as declared, and how many samples
it has; it contributes to the normalisation once. Only then does the server know what it needs to
build the strategy.
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
    """The data of a SuperNode, as its own operator has named them; no run says anything about it.

    Attributes:
        site: the site's name.
        files: where its data are.
        shares: whether it tells how many samples of each class it has.
        limits: what it tells at most.
    """

    site: str
    files: SiteFiles
    shares: bool = False
    limits: Limits = UNLIMITED

    @classmethod
    def of(cls, node_config: Mapping[str, Any]) -> OwnData | None:
        """What the node config says; None for a node without data of its own.

        Raises:
            ConfigError: it is incomplete, or a path is not absolute or a value not allowed.
        """
        given = {key: node_config[key] for key in _KEYS if key in node_config}
        if not given:
            return None
        for key in ("site", "data"):
            if not isinstance(given.get(key), str):
                raise ConfigError(
                    f"this SuperNode's node config has {', '.join(given)} without {key!r} as a"
                    f" text; start it with {EXAMPLE}"
                )
        paths = {key: Path(str(given[key])) for key in _PATHS if key in given}
        for key, path in paths.items():
            if not path.is_absolute():
                raise MachineError(f"node config: {key}={str(path)!r} must be an absolute path")
        shares = boolean("node config: share-counts", given.get("share-counts", False))
        form = CsvFormat.of_query(str(given.get("read", "")))
        return cls(given["site"], SiteFiles(**paths, form=form), shares, Limits.of(node_config))


class SiteClient(NumPyClient):
    """Answers a run's question who it is, and each message with the normalisation agreed on.

    Args:
        settings: the run's configuration.
        own: the site.
        store: where the client's state is.

    Attributes:
        pid: the client that the site is.

    Raises:
        ConfigError: the run is not about the sites' own data, does not declare this site, or has
            less privacy than this machine demands.
        DataError: the site's data are not as declared, or so few that no statistic may be sent.
    """

    def __init__(
        self, settings: Config, own: OwnData, store: Store | Callable[[str], Store]
    ) -> None:
        cfg = settings.cfg
        if not is_local(cfg):
            raise ConfigError(
                f"dataset={settings.choices['dataset']} would cut a data set that all machines hold"
                f" into shares, but this SuperNode is the site {own.site!r} with data of its own;"
                " it takes part in runs with dataset=local"
            )
        noise = allowed_here(settings.run.noise)  # no less than the owner of this machine demands
        self._declared, scheme = declared_elsewhere(settings)
        if noise and self._declared.auto:
            raise ConfigError(
                f"privacy.noise={noise.multiplier:g}: what a site tells of its data has no noise;"
                f" give {' and '.join(self._declared.auto)} as numbers in place of 'auto'"
            )
        if noise and own.shares:
            raise ConfigError(
                f"privacy.noise={noise.multiplier:g}: what a site tells of its data has no noise;"
                f" start the SuperNode of site {own.site!r} without share-counts=true"
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
                f"site {own.site!r} has fewer than min_count={self._least} training samples, and"
                f" would tell their mean and spread: give {' and '.join(self._declared.auto)} as"
                " numbers, with which no site tells any"
            )

    @property
    def description(self) -> SiteDescription:
        """What the server is told of the site's data."""
        own = self._own
        told = self._least if own.shares else None
        about = self._declared, own.site, self._parts
        return SiteDescription.of(*about, min_count=told, least=self._least)

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        return {**self._hosted, "description": json.dumps(asdict(self.description))}

    def _client(self, carried: Mapping[str, Any]) -> FedClient:
        statistics = read_statistics(self._declared, wire.read_header(carried).get(wire.AGREED))
        cfg = self._settings.cfg
        data = LocalData.at_site(cfg, self.pid, self._parts, statistics)
        job = Job(self._settings, engine="flwr", local=data, limits=self._own.limits)
        with confined():  # the model's file of weights, which the run names
            client = job.client(self._store, self._hosted)
        client.site_name = self._own.site
        return client

    def fit(
        self, parameters: list[np.ndarray], config: dict[str, Any]
    ) -> tuple[list[np.ndarray], int, dict[str, Any]]:
        return wire.Adapter(self._client(config)).fit(parameters, config)


def declared_elsewhere(settings: Config) -> tuple[Declaration, Sites]:
    """The declaration of a run that comes from another machine, and its partition.

    Raises:
        ConfigError: it names paths of sites, or is wrong.
    """
    declared, scheme = declaration(settings.cfg)
    if declared.files is not None:
        raise ConfigError(
            f"dataset.files={dict(declared.files)}: a deployed run names no path of a site; each"
            f" SuperNode is started with its own ({EXAMPLE}), and dataset.files is for simulations"
        )
    return declared, scheme


# ---- at the server
class SiteNodes(Nodes):
    """The nodes of a run by site: the number of a site takes the place of the partition-id.

    Args:
        limits: how long to wait for nodes, and how many are enough.
        declared: what the sites have in common.

    Attributes:
        agreed_on: what the sites have told, once they have joined.
    """

    agreed_on: Agreement

    def __init__(self, limits: ReplyLimits, declared: Declaration) -> None:
        super().__init__(limits)
        self._declared = declared
        self._total = len(declared.sites)
        # client -> the node that alone is its site in this run, and what that has told
        self._bound: dict[int, tuple[str, SiteDescription]] = {}

    def join(self, members: Members) -> None:
        """Wait for the sites, and join what they tell of their data.

        Raises:
            RunFailed: a node is no declared site, its data do not fit, or too few have joined.
            Rejected: what they tell does not fit together.
        """
        self._gather(members)
        told = [self._bound.get(pid, ("", None))[1] for pid in range(self._total)]
        agreed = Agreement.of(self._declared, told)
        for site, sizes in zip(self._declared.sites, agreed.sizes, strict=True):
            log.info("site %s: %d training, %d validation, %d test samples", site, *sizes)
        self._warn(agreed)
        self.agreed_on, self.agreed = agreed, agreed.statistics

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

    def _enter(self, cid: str, answer: dict[str, Any]) -> None:
        """Note which site the node is; no other one, and no other data, can take its place.

        Raises:
            ValueError: it is none, or another node is, or its data are others.
        """
        description = self._description(answer)
        site = description.site
        pid = list(self._declared.sites).index(site)
        expected = str((self._declared.nodes or {}).get(site, cid))
        node, before = self._bound.get(pid, (expected, description))
        if cid != node:
            raise ValueError(f"it claims to be site {site!r}, which is node {node}")
        if before != description:
            raise ValueError(f"site {site!r} has other data than when the run began")
        self._by_partition[pid], self._bound[pid] = cid, (cid, description)

    def _description(self, properties: dict[str, Any]) -> SiteDescription:
        text = properties.get("description")
        if not isinstance(text, str) or len(text) > DESCRIPTION_LIMIT:
            raise ValueError("it does not say which site it is")
        try:
            return SiteDescription.read(self._declared, json.loads(text))
        except RecursionError as error:
            raise ValueError("its description is unreadable") from error

    def names(self, pids: Iterable[int]) -> str:
        return f"the sites {[self._declared.sites[pid] for pid in sorted(pids)]}"
