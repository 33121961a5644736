"""The data of a configuration: the dataset, its partition, and the clients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedhet.config.targets import instantiate
from fedhet.data.dataset import Dataset
from fedhet.data.federation import Federation, class_counts
from fedhet.data.scheme import Partition, Scheme, labels_digest


@dataclass(frozen=True)
class RunData:
    """The data of a run, which `dataset`, `partition` and `seed` of `cfg` determine."""

    cfg: DictConfig
    scheme: Scheme
    dataset: Dataset
    partition: Partition

    @classmethod
    def of(cls, cfg: DictConfig) -> RunData:
        """Load the dataset of a configuration and assign its samples to clients."""
        # The scheme first: a setting that is out of range is reported before any data are read.
        scheme: Scheme = instantiate(cfg.partition)
        dataset: Dataset = instantiate(cfg.dataset, data_dir=cfg.data_dir)
        labels = dataset.y.numpy()
        partition = scheme.assign(labels, cfg.seed, dataset.owners, dataset.owner_names)
        return cls(cfg, scheme, dataset, partition)

    @cached_property
    def clients(self) -> Federation:
        """The clients' data."""
        return Federation(
            self.dataset, self.partition, self.scheme.split, self.cfg.seed, self.scheme.noise
        )

    def partition_record(self) -> dict[str, Any]:
        """The content of partition.json: the partition, its settings, and its statistics.

        `partition=saved` reads it.
        """
        dataset = self.dataset
        settings: Any = OmegaConf.to_container(self.cfg.partition)
        del settings["_target_"]
        normalised = None
        if not dataset.text:
            normalised = {"mean": list(dataset.mean), "std": list(dataset.std)}
        return {
            "name": self.partition.name,
            "clients": len(self.partition.indices),
            "hash": self.partition.hash,
            "settings": {**settings, "split": list(self.scheme.split), "noise": self.scheme.noise},
            "seed": self.cfg.seed,
            "samples": len(dataset.y),
            "labels": labels_digest(dataset.y.numpy()),
            "normalised": normalised,
            "shape": list(dataset.shape),
            "classes": list(dataset.classes),
            "owners": list(self.partition.owners),
            "train_sizes": self.clients.sizes,
            "counts": class_counts(dataset, self.partition).tolist(),
            "indices": [indices.tolist() for indices in self.partition.indices],
        }
