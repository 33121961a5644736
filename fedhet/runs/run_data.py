"""Loads the data of a run: the samples and clients that its configuration describes."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
from omegaconf import DictConfig, OmegaConf

from fedhet.core.errors import ConfigError
from fedhet.core.targets import WITH_CLASSES
from fedhet.core.task import Samples
from fedhet.data.array_cache import Arrays, cached_arrays
from fedhet.data.arrays import listed
from fedhet.data.dataset import AUTO, Dataset
from fedhet.data.federation import FederatedData, class_counts, described
from fedhet.data.files import log
from fedhet.data.moments import Own, moments
from fedhet.data.partition import Partition, Scheme, labels_digest
from fedhet.runs.config.instantiation import instantiate


@dataclass(frozen=True)
class RunData:
    """The data of a run, as `dataset`, `partition` and `seed` of `cfg` determine them.

    The mean and std of `dataset` are numbers: `of` has replaced `auto` by the values measured on
    the clients' training samples.
    """

    cfg: DictConfig
    scheme: Scheme
    dataset: Dataset
    partition: Partition
    example: ClassVar[None] = None  # not needed, because this process has the data

    @classmethod
    def of(cls, cfg: DictConfig) -> RunData:
        """Load the dataset of a configuration and assign its samples to clients."""
        # The scheme first, so that a setting out of range is reported before data are read.
        scheme: Scheme = instantiate(cfg.partition)
        dataset: Dataset = instantiate(cfg.dataset, data_dir=cfg.data_dir)
        if not isinstance(dataset, Dataset):
            raise ConfigError(
                "dataset=local: each site has its own data, so there is no partition to describe,"
                " save or export"
            )
        if scheme.by_class and dataset.target not in WITH_CLASSES:
            raise ConfigError(
                f"partition={scheme.name} divides the samples by their class, and"
                f" dataset.target={dataset.target} has none; choose from: iid, quantity, natural,"
                " noise, saved"
            )
        if scheme.pool_test:
            dataset = dataset.pooled()
            if scheme.split[2] == 0:
                log.warning(
                    "partition.pool_test=true with partition.split=%s: there is no global test set,"
                    " and clients have no test samples",
                    list(scheme.split),
                )
        partition = scheme.assign(dataset.y.numpy(), cfg.seed, dataset.owners, dataset.owner_names)
        data = cls(cfg, scheme, dataset, partition)
        data._warn_of_left_out()
        data = replace(data, dataset=data._measured())
        return replace(data, dataset=data._tested())

    @cached_property
    def clients(self) -> FederatedData:
        """The clients' data."""
        return FederatedData(
            self.dataset, self.partition, self.scheme.split, self.cfg.seed, self.scheme.noise
        )

    def _warn_of_left_out(self) -> None:
        """Log how many samples, and which classes, no client has."""
        dataset = self.dataset
        y = dataset.y.numpy()
        left_out = np.ones(len(y), bool)
        left_out[np.concatenate(self.partition.indices)] = False
        if not left_out.any():
            return
        absent = np.setdiff1d(y, y[~left_out]) if dataset.target in WITH_CLASSES else ()
        missing = [dataset.classes[c] for c in absent]
        tested = [] if dataset.test is None else dataset.test.y.unique().tolist()
        names = [name for name in missing if dataset.classes.index(name) in tested]
        where = f"; the global test set has {'them' if names == missing else listed(names)}"
        log.log(
            logging.WARNING if missing else logging.INFO,
            "partition=%s gives %d of %d samples to no client%s",
            *(self.partition.name, left_out.sum(), len(left_out)),
            f", and no client has the classes {listed(missing)}{where if names else ''}"
            if missing
            else "",
        )

    def _measured(self) -> Dataset:
        """Return the dataset with measured numbers in place of `auto`.

        The numbers are cached, because in a deployment a new process serves every message.
        """
        dataset = self.dataset
        found: dict[str, Any] = {}
        for part, prefix in {"x": "", "y": "target_"}.items():
            auto = [name for name in ("mean", "std") if getattr(dataset, prefix + name) == AUTO]
            if not auto or (prefix and dataset.target != "number"):
                continue
            key = {
                "moments": dataset.source,
                "partition": self.partition.hash,
                "split": self.scheme.split,
                "noise": self.scheme.noise,
                "seed": self.cfg.seed,
                "numpy": np.__version__,  # its random streams, and the order of its sums
                **({"of": "targets"} if prefix else {}),
            }
            measure = partial(self._moments, part)
            arrays = cached_arrays(dataset.name, key, measure) if dataset.source else measure()
            measured = {prefix + name: arrays[name].tolist() for name in auto}
            log.info(
                "%s: auto was measured on the clients' %d training samples: %s",
                dataset.name,
                sum(self.clients.sizes),
                ", ".join(f"{name} {values}" for name, values in measured.items()),
            )
            found |= measured
        return replace(dataset, **found)

    def _moments(self, part: str) -> Arrays:
        return moments(getattr(client.train, part).numpy() for client in self.clients).arrays

    def _tested(self) -> Dataset:
        """Return the dataset with each global test sample prepared as its owner's samples are.

        Raises:
            ConfigError: `dataset.mean=own`, and the owner of a test sample is no client.
        """
        dataset = self.dataset
        if dataset.test is None or not dataset.by_client:
            return dataset
        x = dataset.test.x.clone()
        named = np.full(len(x), "") if dataset.test_owners is None else dataset.test_owners
        for pid, owner in enumerate(self.partition.owners):
            if (rows := named == owner).any():
                x[rows] = self.clients.own(pid)(x[rows])
        if (unowned := ~np.isin(named, self.partition.owners)).any():
            x[unowned] = Own.unknown(dataset)(x[unowned])
        return replace(dataset, test=Samples(x, dataset.test.y))

    @property
    def digest(self) -> str:
        """16 hex digits that identify the labels and who has which samples.

        Measured statistics are left out, because their last bits may differ between processors.
        """
        dataset = self.dataset
        kind = [list(dataset.shape), dataset.target, list(dataset.outputs)]
        content = json.dumps([self.partition.hash, labels_digest(dataset.y.numpy()), *kind])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def partition_record(self) -> dict[str, Any]:
        """Return the content of partition.json: the partition, its settings, and its statistics.

        `partition=saved` reads such a file. `counts` and `indices` are arrays, which `write_json`
        writes as lists: lists of a million clients would slow down Python's garbage collector.
        """
        dataset = self.dataset
        settings: Any = OmegaConf.to_container(self.cfg.partition)
        del settings["_target_"]
        ready = [p for p, n in enumerate(self.clients.sizes) if n and dataset.by_client]
        return {
            "name": self.partition.name,
            "clients": len(self.partition.indices),
            "hash": self.partition.hash,
            "settings": {
                **settings,
                "split": list(self.scheme.split),
                "noise": self.scheme.noise,
                "pool_test": self.scheme.pool_test,
            },
            "seed": self.cfg.seed,
            "samples": len(dataset.y),
            "labels": labels_digest(dataset.y.numpy()),
            **described(dataset),
            "own": {str(pid): self.clients.own(pid).record for pid in ready},
            "owners": list(self.partition.owners),
            "train_sizes": self.clients.sizes,
            "counts": class_counts(dataset, self.partition),
            "indices": self.partition.indices,
        }
