"""From a configuration to its data: the dataset, who holds what, and partition.json."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedhet.config.targets import instantiate
from fedhet.data.dataset import Dataset
from fedhet.data.federation import Federation, describe
from fedhet.data.scheme import Partition, Scheme, labels_digest


@dataclass(frozen=True)
class Configured:
    """What `dataset`, `partition` and `seed` of `cfg` make."""

    cfg: DictConfig
    scheme: Scheme
    dataset: Dataset
    partition: Partition

    @classmethod
    def of(cls, cfg: DictConfig) -> Configured:
        # a setting that is out of range is told before any data are read
        scheme = instantiate(cfg.partition)
        dataset = instantiate(cfg.dataset, data_dir=cfg.data_dir)
        return cls(
            cfg,
            scheme,
            dataset,
            scheme.assign(dataset.y.numpy(), cfg.seed, dataset.owners, dataset.owner_names),
        )

    @cached_property
    def clients(self) -> Federation:
        return Federation(
            self.dataset, self.partition, self.scheme.split, self.cfg.seed, self.scheme.noise
        )

    def about(self) -> dict[str, Any]:
        """partition.json: the partition, what made it, and what it is like; `partition=saved` reads
        it."""
        given: Any = OmegaConf.to_container(self.cfg.partition)
        settings = {key: value for key, value in given.items() if key != "_target_"}
        return {
            "name": self.partition.name,
            "clients": len(self.partition.indices),
            "hash": self.partition.hash,
            "settings": {**settings, "split": list(self.scheme.split), "noise": self.scheme.noise},
            "seed": self.cfg.seed,
            "samples": len(self.dataset.y),
            "labels": labels_digest(self.dataset.y.numpy()),
            "normalised": (
                None
                if self.dataset.text
                else {"mean": list(self.dataset.mean), "std": list(self.dataset.std)}
            ),
            "shape": list(self.dataset.shape),
            "classes": list(self.dataset.classes),
            "owners": list(self.partition.owners),
            "train_sizes": self.clients.sizes,
            "counts": describe(self.dataset, self.partition).tolist(),
            "indices": [indices.tolist() for indices in self.partition.indices],
        }
