"""The data of a configuration: the dataset, its partition, and the clients."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
from omegaconf import DictConfig, OmegaConf

from fedhet.config.targets import instantiate
from fedhet.core.errors import ConfigError
from fedhet.core.targets import WITH_CLASSES
from fedhet.data.array_cache import Arrays, cached_arrays
from fedhet.data.dataset import AUTO, Dataset
from fedhet.data.federation import FederatedData, class_counts, target_scale, transform
from fedhet.data.moments import moments
from fedhet.data.partition import Partition, Scheme, labels_digest

log = logging.getLogger("fedhet.data")


@dataclass(frozen=True)
class RunData:
    """The data of a run, which `dataset`, `partition` and `seed` of `cfg` determine.

    The mean and std of `dataset` are numbers here: `of` has replaced `auto` by what it measured on
    the clients' training samples.
    """

    cfg: DictConfig
    scheme: Scheme
    dataset: Dataset
    partition: Partition
    example: ClassVar[None] = None  # the data themselves are here

    @classmethod
    def of(cls, cfg: DictConfig) -> RunData:
        """Load the dataset of a configuration and assign its samples to clients."""
        # The scheme first: a setting that is out of range is reported before any data are read.
        scheme: Scheme = instantiate(cfg.partition)
        dataset: Dataset = instantiate(cfg.dataset, data_dir=cfg.data_dir)
        if not isinstance(dataset, Dataset):
            raise ConfigError(
                "dataset=local: the sites' data are their own, and there is no partition of them to"
                " describe, save or export"
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
                    "partition.pool_test=true with partition.split=%s: there is neither a global"
                    " test set nor a client's own",
                    list(scheme.split),
                )
        labels = dataset.y.numpy()
        partition = scheme.assign(labels, cfg.seed, dataset.owners, dataset.owner_names)
        data = cls(cfg, scheme, dataset, partition)
        return replace(data, dataset=data._measured())

    @cached_property
    def clients(self) -> FederatedData:
        """The clients' data."""
        return FederatedData(
            self.dataset, self.partition, self.scheme.split, self.cfg.seed, self.scheme.noise
        )

    def _measured(self) -> Dataset:
        """The dataset with numbers in the place of `auto`.

        They are cached, because in a deployment every message is handled by a new process.
        """
        dataset, found = self.dataset, {}
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
                "%s: auto is measured on the clients' %d training samples: %s",
                dataset.name,
                sum(self.clients.sizes),
                ", ".join(f"{name} {values}" for name, values in measured.items()),
            )
            found |= measured
        return replace(dataset, **found)

    def _moments(self, part: str) -> Arrays:
        return moments(getattr(client.train, part).numpy() for client in self.clients).arrays

    @property
    def digest(self) -> str:
        """16 hex digits of the labels and of who has which samples.

        Measured statistics are not part of it: their last bits may differ between processors.
        """
        dataset = self.dataset
        kind = [list(dataset.shape), dataset.target, list(dataset.outputs)]
        labels = labels_digest(dataset.y.numpy())
        content = json.dumps([self.partition.hash, labels, *kind])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def partition_record(self) -> dict[str, Any]:
        """The content of partition.json: the partition, its settings, and its statistics.

        `partition=saved` reads it.
        """
        dataset = self.dataset
        settings: Any = OmegaConf.to_container(self.cfg.partition)
        del settings["_target_"]
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
            "owners": list(self.partition.owners),
            "train_sizes": self.clients.sizes,
            "counts": class_counts(dataset, self.partition).tolist(),
            "indices": [indices.tolist() for indices in self.partition.indices],
        }


def described(dataset: Dataset) -> dict[str, Any]:
    """What partition.json says about the samples, from which a model can be built and used."""
    normalize = transform(dataset)
    normalised = None
    if normalize is not None:
        normalised = {"mean": list(normalize.mean), "std": list(normalize.std)}
    scale = target_scale(dataset)
    return {
        "normalised": normalised,
        "shape": list(dataset.shape),
        "columns": list(dataset.columns),
        "target": dataset.target,
        "classes": list(dataset.classes),
        "numbers": list(dataset.numbers),
        "target_scale": scale and {"mean": list(scale[0]), "std": list(scale[1])},
        "vocabulary": dataset.vocabulary,
        "padding": dataset.padding,
    }
