"""The data of a run with dataset=local, in one process.

A simulation reads the files of all sites, a client's process the files of its site, and the server
none. All of them have the same declaration and the same statistics for normalisation.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from fedhet.core.errors import ConfigError
from fedhet.core.limits import least_count
from fedhet.core.server.merging import Mean
from fedhet.core.task import PARTS, ClientData, HeldClients, Samples, Task
from fedhet.data.dataset import Dataset
from fedhet.data.federation import described
from fedhet.data.files import SITE_HINT, find_path, log
from fedhet.data.local.declaration import Declaration, Sites
from fedhet.data.local.description import Agreement, SiteDescription, check_sizes
from fedhet.data.local.reading import SiteFiles, client_data, located, read
from fedhet.data.moments import Own
from fedhet.runs.config.instantiation import find_target, instantiate


def is_local(cfg: DictConfig) -> bool:
    """Whether each client of a run has the data of its own site."""
    return find_target(cfg.dataset) is Declaration


def check_merge(cfg: DictConfig, merge: Mean, task: Task) -> None:
    """Refuse merges that limit the size of updates if nothing limits the weights that sites claim.

    Raises:
        ConfigError: the merge needs a limit, and neither `dataset.max_samples` nor the clients'
            sizes are given.
    """
    local = is_local(cfg) and cfg.dataset.max_samples is None
    if "used weights" not in merge.breaks and merge.name != Mean.name and (local or task.unsized):
        where, bound = (
            ("the number of clients alone", "their sizes, Task(clients=[<number>, ...])")
            if task.unsized
            else (
                "dataset=local",
                "the largest number that a site may have, dataset.max_samples=<number>",
            )
        )
        raise ConfigError(
            f"merge={merge.name} with {where}: the weight of a client is the number of samples that"
            f" it claims, so a client that claims very many would decide the mean alone; give"
            f" {bound}"
        )


def declaration(cfg: DictConfig) -> tuple[Declaration, Sites]:
    """Return the declaration of a run, and its partition.

    Raises:
        ConfigError: the partition would divide the sites' data, or a setting is wrong.
    """
    if find_target(cfg.partition) is not Sites:
        raise ConfigError(
            f"dataset=local with partition={cfg.partition.get('name')}: each site keeps all of its"
            " data, so no partition may divide them into shares; leave partition=... out, or write"
            " partition=sites"
        )
    scheme: Sites = instantiate(cfg.partition)
    declared: Declaration = instantiate(cfg.dataset, data_dir=cfg.data_dir)
    if scheme.clients not in (None, len(declared.sites)):
        raise ConfigError(
            f"partition.clients={scheme.clients}: dataset.sites declares {len(declared.sites)}"
            " sites, and each site is one client; leave partition.clients out"
        )
    return declared, scheme


class SiteClients(HeldClients):
    """All clients of a run. Only clients with data in this process can be accessed.

    Args:
        dataset: the agreed description, by which each client prepares its samples.
        parts: client -> its parts, as read from its files.
        part_sizes: each client's numbers of training, validation and test samples; 0: unknown.
    """

    place = "at its site, not on this machine"

    def __init__(
        self,
        dataset: Dataset,
        parts: Mapping[int, Mapping[str, Samples]],
        part_sizes: Sequence[Sequence[int]],
    ) -> None:
        super().__init__(part_sizes, parts)
        own = parts.items() if dataset.by_client else ()
        self.own = {pid: Own.of(dataset, parts["train"].x) for pid, parts in own}

    def _client(self, pid: int) -> ClientData:
        parts = self.here[pid]
        if own := self.own.get(pid):
            parts = {name: own.samples(samples) for name, samples in parts.items()}
        # An empty part becomes None.
        return ClientData(parts["train"], parts.get("val") or None, parts.get("test") or None)


@dataclass(frozen=True)
class LocalData:
    """One process's part of the data of a run.

    Attributes:
        cfg: the configuration.
        declared: the declaration.
        dataset: the global test set and the agreed statistics, without other samples.
        clients: the clients.
        agreed: the reports of the sites; None in a client's process.
    """

    cfg: DictConfig
    declared: Declaration
    dataset: Dataset
    clients: SiteClients
    agreed: Agreement | None

    @property
    def example(self) -> Tensor:
        """An example input from the declaration: a simulation uses no more than the server has."""
        return self.declared.example

    @property
    def digest(self) -> str:
        """16 hex digits of the declaration."""
        return self.declared.digest

    @classmethod
    def simulated(cls, cfg: DictConfig, engine: str) -> LocalData:
        """Read the data of all sites on this machine, each site from its entry in `dataset.files`.

        Raises:
            ConfigError: a site has no file, or the engine is flwr, because its nodes get no files.
            DataError: a file does not fit the declaration; the message names the site.
        """
        declared, scheme = declaration(cfg)
        if engine == "flwr":
            raise ConfigError(
                "dataset=local: this node has no data of its own. In a deployment, a SuperNode gets"
                ' them by --node-config \'site="a" data="/path"\'. With engine=flwr on one machine,'
                " the nodes have none: try the run with engine=local and dataset.files"
            )
        files = declared.files or {}
        if missing := [site for site in declared.sites if site not in files]:
            raise ConfigError(
                f"dataset=local: a simulation needs dataset.files={{{missing[0]}: <path>, ...}}"
                f" for {missing}; in a deployment each site names its own file"
            )
        parts: dict[int, Mapping[str, Samples]] = {}
        for pid, site in enumerate(declared.sites):
            path = find_path(declared.data_dir, files[site], SITE_HINT)
            own = SiteFiles(path, form=declared.form)
            parts[pid] = own_parts(declared, scheme, cfg.seed, site, own)
        least = least_count(cfg.privacy.min_count)
        descriptions = [
            SiteDescription.of(declared, site, parts[pid], min_count=0, least=least)
            for pid, site in enumerate(declared.sites)
        ]
        return cls.agreed_on(cfg, Agreement.of(declared, descriptions), parts)

    @classmethod
    def agreed_on(
        cls,
        cfg: DictConfig,
        agreed: Agreement,
        parts: Mapping[int, Mapping[str, Samples]] | None = None,
    ) -> LocalData:
        """Build the data of a server, which has no samples, or of a simulation, with `parts`."""
        declared, _ = declaration(cfg)
        for key, values in agreed.statistics.items():
            log.info("%s: %s %s, over all sites' training parts", declared.name, key, values)
        dataset = declared.dataset(test=test_set(declared), agreed=agreed.statistics)
        if dataset.test is not None and dataset.by_client:
            dataset = replace(dataset, test=Own.unknown(dataset).samples(dataset.test))
        return cls(cfg, declared, dataset, SiteClients(dataset, parts or {}, agreed.sizes), agreed)

    @classmethod
    def at_site(
        cls,
        cfg: DictConfig,
        pid: int,
        parts: Mapping[str, Samples],
        statistics: Mapping[str, list[float]],
    ) -> LocalData:
        """Build the data of the client `pid` in a process at its site."""
        declared, _ = declaration(cfg)
        sizes = [[0] * len(PARTS) for _ in declared.sites]
        sizes[pid] = [len(parts[part]) if part in parts else 0 for part in PARTS]
        dataset = declared.dataset(agreed=statistics)
        return cls(cfg, declared, dataset, SiteClients(dataset, {pid: parts}, sizes), None)

    def partition_record(self) -> dict[str, Any]:
        """Return the content of partition.json; it does not say which samples a site has."""
        sites = list(self.declared.sites)
        settings: Any = OmegaConf.to_container(self.cfg.partition)
        del settings["_target_"]
        record = {
            "name": "sites",
            "clients": len(sites),
            "settings": {**settings, "clients": len(sites)},
            "seed": self.cfg.seed,
            **described(self.dataset),
            "own": {str(pid): own.record for pid, own in self.clients.own.items()},
            "declaration": self.declared.digest,
            "owners": sites,
            "train_sizes": self.clients.sizes,
        }
        if self.agreed is not None:
            record["sizes"] = {
                site: dict(zip(PARTS, sizes, strict=True))
                for site, sizes in zip(sites, self.agreed.sizes, strict=True)
            }
            counts = [None if site is None else site.counts for site in self.agreed.descriptions]
            record["reported_counts"] = dict(zip(sites, counts, strict=True))
            if all(reported is not None and None not in reported for reported in counts):
                record["counts"] = counts
        identity = json.dumps([self.declared.digest, sites, record.get("sizes")])
        return record | {"hash": hashlib.sha256(identity.encode()).hexdigest()[:16]}


def test_set(declared: Declaration) -> Samples | None:
    """Read the global test set, which only the server uses; None if the run has none.

    Raises:
        DataError: the file is missing, or does not fit the declaration.
    """
    if declared.test is None:
        return None
    path = find_path(declared.data_dir, declared.test, "Name the file in dataset.test")
    with located(f"dataset.test={declared.test} does not fit the declaration"):
        return read(path, declared, ("test",), declared.form)["test"]


def own_parts(
    declared: Declaration, scheme: Sites, seed: int, site: str, files: SiteFiles
) -> dict[str, Samples]:
    """The parts of a site's data as its client uses them.

    Raises:
        DataError: the files are not as declared, or have more samples than that allows; the message
            names the site.
    """
    with located(f"site {site!r} does not fit the declaration"):
        found = files.read(declared)
    parts = client_data(found, scheme.split, seed, declared.number_of(site))
    check_sizes(declared, site, map(len, parts.values()))
    return parts
